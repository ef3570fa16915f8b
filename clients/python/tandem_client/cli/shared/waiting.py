"""Remarks on stderr about what a command waits for, after about a second of silence."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Self

from tandem_client.admin import AdminClient
from tandem_client.channel import ChannelOptions
from tandem_client.cli.shared import options
from tandem_client.cli.shared.screen import remark
from tandem_client.events import Delta, Event, Prefilled, Queued, Scheduled, Started

PATIENCE_S = 1.0


class Waits:
    """
    Remarks on what a command waits for; each is printed after PATIENCE_S, and only once.

    The time inside the `with` block counts; a separate thread watches the clock.
    """

    def __init__(self, waits_for: str) -> None:
        """
        Args:
            waits_for: Sentence on what the block waits for, until `now_for` replaces it.
        """
        self._changed = threading.Condition()
        self._waits_for = waits_for
        self._said: set[str] = set()
        self._is_over = False
        self._kind = waits_for
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    def now_for(self, kind: str, sentence: str = "") -> None:
        """
        Set what the command waits for now.

        Args:
            kind: Kind of the sentence; only one sentence of a kind is printed.
            sentence: Sentence for the user; empty = nothing to print.
        """
        with self._changed:
            self._kind, self._waits_for = kind, sentence
            self._changed.notify()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_over:
                self._remark_on(self._kind)

    def _remark_on(self, kind: str) -> None:
        """Wait until another kind of event comes; say once what is waited for, if that is long."""
        is_told = not self._waits_for or kind in self._said
        self._changed.wait_for(
            lambda: self._is_over or self._kind != kind, None if is_told else PATIENCE_S
        )
        if not self._is_over and self._kind == kind and self._waits_for:
            self._said.add(kind)
            with contextlib.suppress(OSError):  # a closed stderr is no reason to fail
                say(self._waits_for)


def told(events: Iterable[Event], address: str) -> Iterator[Event]:
    """Yield the events of a stream, with remarks on what it waits for until output comes."""
    num_prompt_tokens = 0
    with Waits(no_answer(address)) as waits:
        for event in events:
            match event:
                case Started():
                    num_prompt_tokens = event.prompt_tokens
                    waits.now_for("accepted", "waiting: the server has accepted the request")
                case Queued() | Scheduled() | Prefilled() if event.blocked_by:
                    waits.now_for(event.blocked_by, f"waiting: {event.blocked_by}")
                case Queued():
                    ahead = f"{event.position} are ahead" if event.position else "it is next"
                    waits.now_for("queued", f"waiting: the request is queued, {ahead}")
                case Scheduled() | Prefilled():
                    waits.now_for(
                        "prefill", f"waiting: the prompt is computed ({num_prompt_tokens} tokens)"
                    )
                case Delta():
                    waits.now_for("output")
                case _:
                    waits.now_for("end")
            yield event


@contextlib.contextmanager
def operators_of(
    address: str, channel: ChannelOptions, waits_for: str = ""
) -> Iterator[AdminClient]:
    """Yield a client of a server's admin port; print a remark if it does not answer."""
    with (
        AdminClient(address, retry=options.RETRY, options=channel) as admin,
        Waits(waits_for or no_answer(address)),
    ):
        yield admin


def no_answer(address: str) -> str:
    """Return a sentence that says that the address has not answered."""
    return f"waiting: {address} has not answered yet"


def say(line: str) -> None:
    """Print a remark on stderr, in brackets, apart from the answer."""
    remark(f"[{line}]")
