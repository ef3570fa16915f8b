"""Models that are served: their names, and what clients are told of them."""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.frontend.request.requests import default_sampling, default_stopping
from scheduler_svc.frontend.request.response import capabilities
from scheduler_svc.frontend.stream.whole import MAX_COMPLETE_BYTES
from scheduler_svc.frontend.text.served_model import LoadedModel
from scheduler_svc.ipc.messages import Model
from tandem.errors import InvalidParameter, ModelNotFound
from tandem.inference.v1 import model_pb2

MAX_PAGE_SIZE = 1000
MAX_SHOWN_CHARS = 128
"""Limit of a name that an error quotes."""


class NamesModel(Protocol):
    """Request that may name the model it is for."""

    model: str

    def HasField(self, field_name: str, /) -> bool:  # noqa: N802  # named by protobuf
        """Return True if a field is set."""


def check_model(request: NamesModel, model: Model) -> None:
    """
    Check that a request that names a model names the one that is served.

    Raises:
        ModelNotFound: It names another.
    """
    if request.HasField("model") and request.model != model.name:
        raise ModelNotFound(
            f"no model {request.model[:MAX_SHOWN_CHARS]!r} is served here, but {model.name!r}.",
            field="model",
            metadata={"served": model.name},
        )


def check_page(request: model_pb2.ListModelsRequest) -> None:
    """
    Check which page of the models is asked for: all fit on the first.

    Raises:
        InvalidParameter: There is no such page.
    """
    if request.HasField("page_size") and not 1 <= request.page_size <= MAX_PAGE_SIZE:
        raise InvalidParameter(
            f"page_size must be in [1, {MAX_PAGE_SIZE}], got {request.page_size}.",
            field="page_size",
        )
    if request.page_token:
        raise InvalidParameter(
            "page_token must be empty or the next_page_token of the page before.",
            field="page_token",
        )


def describe_model(
    loaded: LoadedModel, max_request_bytes: int, max_items: int, *, scores_prompts: bool
) -> model_pb2.Model:
    """Return what clients are told of a model, and of the limits of requests and batches."""
    model, text = loaded.model, loaded.text
    return model_pb2.Model(
        name=model.name,
        revision=model.revision,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        default_sampling=default_sampling(model),
        default_stopping=default_stopping(model),
        capabilities=capabilities(
            has_tokenizer=text.has_tokenizer,
            has_chat_template=text.has_chat_template,
            scores_prompts=scores_prompts,
        ),
        max_request_bytes=max_request_bytes,
        max_complete_bytes=MAX_COMPLETE_BYTES,
        max_items_in_flight=max_items,
    )
