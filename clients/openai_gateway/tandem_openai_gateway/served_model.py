"""The model that the schedulers serve, and the names that requests may give it."""

from __future__ import annotations

from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.scheduler_calls.batch_call import Metadata
from tandem_openai_gateway.scheduler_calls.schedulers import Schedulers
from tandem_openai_gateway.upstream import Model, Started


class ServedModel:
    """
    Name of the served model, as far as it is known; it is asked for again when a request names
    another one and when an answer came from another revision.
    """

    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers
        self._known: Model | None = None

    async def ask(self, metadata: Metadata) -> Model:
        """
        Return the model that is served now.

        Raises:
            TandemError: No scheduler answers.
        """
        self._known = await self._schedulers.get_model(metadata)
        return self._known

    async def check(self, name: str | None, metadata: Metadata) -> str:
        """
        Return the name of the served model.

        Args:
            name: Name that the request gives; None = any.
            metadata: Metadata of the request.

        Raises:
            ApiError: Another model is served.
            TandemError: No scheduler answers.
        """
        model = self._known
        if model is None or name not in (None, model.name):
            model = await self.ask(metadata)
        if name not in (None, model.name):
            raise ApiError(
                404,
                f"the model {name!r} is not served here; the served model is {model.name!r}",
                param="model",
                code="model_not_found",
            )
        return model.name

    def note(self, started: Started) -> None:
        """Forget the name if the schedulers have changed the model."""
        if self._known is not None and self._known.revision != started.model_revision:
            self._known = None
