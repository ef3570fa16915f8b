"""Answers to questions about tokens: the ids of a prompt, and the text of ids."""

from __future__ import annotations

from scheduler_svc.frontend.request.lengths import check_prompt_len
from scheduler_svc.frontend.request.prompt import encode_prompt
from scheduler_svc.frontend.request.validation import check_token_ids
from scheduler_svc.frontend.text.served_model import LoadedModel
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from tandem.errors import EmptyPrompt
from tandem.inference.v1.tokens_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

INLINE_TOKENS = 1000
"""Most ids that are detokenized on the event loop, cheaper than handing them to a thread."""
INLINE_TEXTS = 100
"""Most ids whose texts are told one by one there: each may take twenty microseconds."""


async def tokenize(
    request: TokenizeRequest, loaded: LoadedModel, threads: TokenizerThreads, *, tenant: str
) -> TokenizeResponse:
    """
    Return the ids of a prompt; `tenant` is whose turn on the threads it takes.

    Raises:
        TandemError: The prompt cannot be used.
    """
    if request.WhichOneof("prompt") is None:
        raise EmptyPrompt("a prompt is needed: set text or chat.", field="prompt")
    ids = await encode_prompt(request, loaded, threads, tenant=tenant)

    def tell() -> list[str]:
        return [loaded.text.token_text(one) for one in ids]

    texts: list[str] = []
    if request.with_texts:
        is_short = len(ids) <= INLINE_TEXTS
        texts = tell() if is_short else await threads.run(tell, tenant=tenant)
    return TokenizeResponse(
        token_ids=ids,
        token_texts=texts,
        max_model_len=loaded.model.max_model_len,
    )


async def detokenize(
    request: DetokenizeRequest, loaded: LoadedModel, threads: TokenizerThreads, *, tenant: str
) -> DetokenizeResponse:
    """
    Return the text of ids; `tenant` is whose turn on the threads it takes.

    Raises:
        PromptTooLong: There are more ids than a prompt can have.
        InvalidParameter: An id is not in the vocabulary, or the model has no tokenizer.
    """
    model, ids = loaded.model, request.token_ids
    check_prompt_len(len(ids), model.max_model_len, prompt_field="token_ids")
    check_token_ids(ids, model.vocab_size, field="token_ids")

    def decode() -> str:
        return loaded.text.decode(ids, keep_special_tokens=request.keep_special_tokens)

    is_short = len(ids) <= INLINE_TOKENS
    text = decode() if is_short else await threads.run(decode, tenant=tenant)
    return DetokenizeResponse(text=text)
