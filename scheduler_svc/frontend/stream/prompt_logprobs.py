"""Messages with the log probabilities of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.stream.inbox import News
from tandem.errors import InternalError
from tandem.inference.v1.inference_service_pb2 import GenerateResponse
from tandem.inference.v1.stream_pb2 import PromptLogprobs, TokenLogprobs
from tandem.link.logprobs import TokenLogprob

_BY_ITSELF = frozenset(
    (
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.STOP_STRING,
        FinishReason.MAX_TOKENS,
        FinishReason.CONTEXT_LIMIT,
    )
)
"""Reasons of choices that were not cut short: the prompt was told before them."""
TOKENS_PER_MESSAGE = 256
"""Most prompt tokens of one message: with 20 likeliest ids each about 100 KB."""


class PromptTeller:
    """Maker of the messages about one prompt, in order and without a gap."""

    def __init__(self, prompt: Sequence[int], text_of: Callable[[int], str]) -> None:
        """
        Args:
            prompt: Ids of the prompt; none for a request that is told nothing of it.
            text_of: Returns the text of a token by itself.
        """
        self._prompt = prompt
        self._text_of = text_of
        self._num_told = 0

    def messages(self, news: News, num_kept: int) -> Iterator[GenerateResponse]:
        """
        Yield the messages about the next prompt tokens.

        Args:
            news: What came since the last call.
            num_kept: Tokens of the prompt that the core kept, the last ones.

        Raises:
            InternalError: Some are missing, before these or before the end of a choice.
        """
        if not self._prompt:
            return
        if not self._num_told:  # nothing predicts the first token
            self._prompt = self._prompt[-num_kept:]
            yield self._message(0, [TokenLogprobs(text=self._text_of(self._prompt[0]))])
        for first in range(0, len(news.scores), TOKENS_PER_MESSAGE):
            part = news.scores[first : first + TOKENS_PER_MESSAGE]
            position = len(self._prompt) + part[0][0]
            self._check(is_there=position == self._num_told)
            ids = self._prompt[position : position + len(part)]
            told = [self._entry(one, entry) for one, (_, entry) in zip(ids, part, strict=True)]
            yield self._message(position, told)
        ends = [one.end.reason for one in news.choices if one.end is not None]
        is_whole = self._num_told == len(self._prompt)
        self._check(is_there=is_whole or _BY_ITSELF.isdisjoint(ends))

    def _check(self, *, is_there: bool) -> None:
        if not is_there:
            raise InternalError(
                f"log probabilities of prompt token {self._num_told} were lost between core and "
                "frontend"
            )

    def _entry(self, token_id: int, entry: TokenLogprob) -> TokenLogprobs:
        return TokenLogprobs(
            logprob=entry.logprob,
            top_token_ids=entry.top_token_ids,
            top_logprobs=entry.top_logprobs,
            text=self._text_of(token_id),
            top_texts=[self._text_of(one) for one in entry.top_token_ids],
            rank=entry.rank,
        )

    def _message(self, position: int, told: list[TokenLogprobs]) -> GenerateResponse:
        ids = self._prompt[position : position + len(told)]
        self._num_told = position + len(told)
        return GenerateResponse(
            prompt_logprobs=PromptLogprobs(first_position=position, token_ids=ids, logprobs=told)
        )
