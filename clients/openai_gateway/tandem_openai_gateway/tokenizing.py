"""Answers of /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tandem_openai_gateway.answering import metadata_of, read_limited
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

    def __init__(self, schedulers: Schedulers, model: ServedModel, max_body_bytes: int) -> None:
        self._schedulers = schedulers
        self._model = model
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        """Answer with the ids of a prompt."""
        asked = read_tokenize(await read_limited(request, self._max_body_bytes))
        metadata = metadata_of(request)
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
        asked = read_detokenize(await read_limited(request, self._max_body_bytes))
        metadata = metadata_of(request)
        await self._model.check(asked.model, metadata)
        text = await self._schedulers.detokenize(asked.tokens, metadata)
        return JsonResponse(DetokenizeBody(prompt=text))
