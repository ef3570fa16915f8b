"""Answers of /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tandem_openai_gateway.api.body import Bodies
from tandem_openai_gateway.api.headers import metadata_of
from tandem_openai_gateway.api.tokens import (
    DetokenizeBody,
    TokenizeBody,
    read_detokenize,
    read_tokenize,
)
from tandem_openai_gateway.envelope import JsonResponse
from tandem_openai_gateway.scheduler_calls.schedulers import Schedulers
from tandem_openai_gateway.served_model import ServedModel


class Tokenizing:
    """Questions about tokens, which any scheduler answers."""

    def __init__(self, schedulers: Schedulers, model: ServedModel, bodies: Bodies) -> None:
        self._schedulers = schedulers
        self._model = model
        self._bodies = bodies

    async def tokenize(self, request: Request) -> Response:
        """Answer with the ids of a prompt."""
        metadata = metadata_of(request)
        await self._model.admit(metadata)
        asked = await self._bodies.decoded(request, read_tokenize)
        await self._model.check(asked.model, metadata)
        found = await self._schedulers.tokenize(asked.prompt, asked.options(), metadata)
        return JsonResponse(
            TokenizeBody(
                count=len(found.token_ids),
                max_model_len=found.max_model_len,
                tokens=list(found.token_ids),
                token_strs=list(found.texts) if asked.return_token_strs else None,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of ids."""
        metadata = metadata_of(request)
        await self._model.admit(metadata)
        asked = await self._bodies.decoded(request, read_detokenize)
        await self._model.check(asked.model, metadata)
        text = await self._schedulers.detokenize(asked.tokens, metadata)
        return JsonResponse(DetokenizeBody(prompt=text))
