"""Answers of /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tandem_openai_gateway.api.body import Bodies
from tandem_openai_gateway.api.headers import key_of, metadata_of
from tandem_openai_gateway.api.scheduler_errors import answered
from tandem_openai_gateway.api.tokens import (
    DetokenizeAsked,
    DetokenizeBody,
    TokenizeAsked,
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
        max_bytes = self._model.max_request_bytes

        def read(body: bytes) -> TokenizeAsked:
            return read_tokenize(body, max_bytes)

        async with self._bodies.decoded(request, key_of(metadata), read) as asked:
            with answered(asked.naming), self._model.forgetting(metadata):
                await self._model.check(asked.model, metadata)
                found = await self._schedulers.tokenize(asked.request, metadata)
        return JsonResponse(
            TokenizeBody(
                count=len(found.token_ids),
                max_model_len=found.max_model_len,
                tokens=list(found.token_ids),
                token_strs=list(found.texts) if asked.with_texts else None,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of ids."""
        metadata = metadata_of(request)
        await self._model.admit(metadata)
        max_bytes = self._model.max_request_bytes

        def read(body: bytes) -> DetokenizeAsked:
            return read_detokenize(body, max_bytes)

        async with self._bodies.decoded(request, key_of(metadata), read) as asked:
            with answered(asked.naming), self._model.forgetting(metadata):
                await self._model.check(asked.model, metadata)
                text = await self._schedulers.detokenize(asked.request, metadata)
        return JsonResponse(DetokenizeBody(prompt=text))
