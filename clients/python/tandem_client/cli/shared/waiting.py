"""Remarks on stderr about what a command waits for, after about a second of silence."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
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
        self._waits: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        """Kind and sentence of each wait; None at the end. The main thread touches no more than
        this: Ctrl-C, which may come at any moment there, cannot leave it half changed."""
        self._waits.put((waits_for, waits_for))
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    def now_for(self, kind: str, sentence: str = "") -> None:
        """
        Set what the command waits for now.

        Args:
            kind: Kind of the sentence; only one sentence of a kind is printed.
            sentence: Sentence for the user; empty = nothing to print.
        """
        self._waits.put((kind, sentence))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waits.put(None)
        self._thread.join()

    def _run(self) -> None:
        said: set[str] = set()
        kind, since = None, 0.0
        wait = self._waits.get()
        while wait is not None:
            if wait[0] != kind:
                kind, since = wait[0], time.monotonic()
            wait = self._remarked(wait, since, said)

    def _remarked(
        self, wait: tuple[str, str], since: float, said: set[str]
    ) -> tuple[str, str] | None:
        """Return the next wait; say once what this one is for, if it is long."""
        kind, sentence = wait
        if sentence and kind not in said:
            left_s = since + PATIENCE_S - time.monotonic()
            try:
                return self._waits.get(timeout=max(left_s, 0.0))
            except Empty:
                said.add(kind)
                with contextlib.suppress(OSError):  # a closed stderr is no reason to fail
                    say(sentence)
        return self._waits.get()


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
