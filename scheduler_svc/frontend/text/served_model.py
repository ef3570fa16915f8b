"""Model that is served now, with its tokenizer, which is loaded in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from scheduler_svc.frontend.text.tokenizer import TextModel
from scheduler_svc.ipc.messages import Model
from tandem.errors import InvalidModel, NoExecutor, TandemError

MAX_REFUSAL_CHARS = 600
"""Limit of a refusal in an error's metadata: trailers must stay under 8 KiB."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Model with its tokenizer; a request keeps the one it started with."""

    model: Model
    text: TextModel


class ServedModel:
    """
    Model that is served now. Owned by the event loop.

    Attributes:
        refusal: See Availability.refusal.
    """

    def __init__(self) -> None:
        self._loading: asyncio.Task[LoadedModel] | None = None
        self.refusal = ""

    def load(self, model: Model, when_done: Callable[[], None]) -> None:
        """Start to load a model in place of the last one; `when_done` is called at any end."""
        task = asyncio.create_task(_load(model))
        task.add_done_callback(lambda _: when_done())
        self._loading = task

    @property
    def is_loaded(self) -> bool:
        """True if the model is loaded, so that no request waits for it or fails."""
        task = self._loading
        return (
            task is not None and task.done() and not task.cancelled() and task.exception() is None
        )

    async def get(self) -> LoadedModel:
        """
        Wait until the model is loaded, and return it.

        Raises:
            NoExecutor: No model is known yet.
            InvalidModel: The model's tokenizer or template cannot be used.
        """
        if self._loading is None:
            why = self.refusal or "it is missing or still loading, see the scheduler's log"
            raise NoExecutor(
                f"no executor has been attached yet, so no model is known: {why}",
                metadata={"refusal": self.refusal[:MAX_REFUSAL_CHARS]} if self.refusal else None,
            )
        return await asyncio.shield(self._loading)


async def _load(model: Model) -> LoadedModel:
    try:
        text = await asyncio.to_thread(TextModel.load, Path(model.tokenizer_dir))
    except TandemError as error:
        # The sentence says all, without a traceback; requests raise the error itself.
        _log.error("tokenizer_unusable", reason=error.reason, message=error.message)
        raise
    except Exception as error:
        _log.exception("tokenizer_unusable", reason=InvalidModel.reason)
        raise InvalidModel(
            f"the model's tokenizer files cannot be used: {type(error).__name__}: {error}"
        ) from error
    _log.info(
        "model_known",
        model=model.name,
        revision=model.revision,
        has_chat_template=text.has_chat_template,
    )
    return LoadedModel(model=model, text=text)
