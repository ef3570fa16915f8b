"""
Prompts: the ids of a text, of a conversation, or as they were sent; the same for a request and for
a question about its tokens.

Field paths start at the message that has the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scheduler_svc.frontend.request.chat import MESSAGES, read_chat
from scheduler_svc.frontend.request.lengths import check_prompt_len, longest_prompt
from scheduler_svc.frontend.request.validation import check_token_ids
from scheduler_svc.frontend.text.chat_template import Conversation
from scheduler_svc.frontend.text.served_model import LoadedModel
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from scheduler_svc.ipc.messages import Model
from tandem.inference.v1 import chat_pb2, request_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tandem.inference.v1.tokens_pb2 import TokenizeRequest

INLINE_TEXT_CHARS = 2000
"""Longest text that is tokenized on the event loop, cheaper than handing it to a thread."""


async def encode_prompt(
    request: GenerateRequest | TokenizeRequest,
    loaded: LoadedModel,
    threads: TokenizerThreads,
    *,
    tenant: str,
) -> list[int]:
    """
    Return the ids of a prompt whose kind was checked.

    Args:
        request: The message that has the prompt.
        loaded: The served model.
        threads: Threads for conversations and long texts.
        tenant: Tenant whose turn on the threads it takes.

    Raises:
        TandemError: The prompt cannot be used.
    """
    model, text = loaded.model, loaded.text
    if isinstance(request, GenerateRequest) and request.HasField("token_ids"):
        return _sent_ids(request.token_ids, model)
    if request.HasField("chat"):
        return await threads.run(lambda: _encode_chat(request.chat, loaded), tenant=tenant)
    _check_at_least(text.min_tokens(request.text), model, "text")
    encode = text.encode_marked if request.parse_special_tokens else text.encode_text
    prompt = request.text
    if len(prompt) <= INLINE_TEXT_CHARS:
        return encode(prompt)
    return await threads.run(lambda: encode(prompt), tenant=tenant)


def _encode_chat(chat: chat_pb2.ChatPrompt, loaded: LoadedModel) -> list[int]:
    """Read a conversation and encode it, both on a thread: its JSON may take long to parse."""
    model, text = loaded.model, loaded.text
    conversation = read_chat(chat)
    at_least = max((text.min_tokens(one) for one in _contents(conversation)), default=0)
    _check_at_least(at_least, model, MESSAGES)
    return text.encode_chat(conversation, max_prompt_len=longest_prompt(model))


def _sent_ids(sent: request_pb2.TokenIds, model: Model) -> list[int]:
    if not model.truncates:
        check_prompt_len(len(sent.ids), model.max_model_len, prompt_field="token_ids.ids")
    ids = list(sent.ids)
    check_token_ids(ids, model.vocab_size, field="token_ids.ids")
    return ids


def _contents(conversation: Conversation) -> Iterator[str]:
    """Yield the texts of the messages' contents."""
    for message in conversation.messages:
        content: Any = message.get("content") or ""
        yield content if isinstance(content, str) else "".join(part["text"] for part in content)


def _check_at_least(num_tokens: int, model: Model, prompt_field: str) -> None:
    check_prompt_len(num_tokens, longest_prompt(model), prompt_field=prompt_field, is_bound=True)
