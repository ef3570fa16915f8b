"""Description of the API for programs: /openapi.json."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from tandem_openai_gateway.answers.chat import ChatCompletion
from tandem_openai_gateway.answers.completion import CompletionBody
from tandem_openai_gateway.answers.pages import HealthBody, ModelBody, ModelList
from tandem_openai_gateway.answers.responses import ResponseBody
from tandem_openai_gateway.api.chat import ChatFields
from tandem_openai_gateway.api.completion import CompletionFields
from tandem_openai_gateway.api.responses import ResponsesFields
from tandem_openai_gateway.api.tokens import (
    DetokenizeBody,
    DetokenizeFields,
    TokenizeBody,
    TokenizeFields,
)
from tandem_openai_gateway.errors import ErrorAnswer

POSTED: tuple[tuple[str, type[msgspec.Struct], type[msgspec.Struct]], ...] = (
    ("/v1/chat/completions", ChatFields, ChatCompletion),
    ("/v1/completions", CompletionFields, CompletionBody),
    ("/v1/responses", ResponsesFields, ResponseBody),
    ("/tokenize", TokenizeFields, TokenizeBody),
    ("/detokenize", DetokenizeFields, DetokenizeBody),
)
"""Path, body of the request and body of the answer of each endpoint; those of /v1 may stream."""
READ: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("/v1/models", ModelList),
    ("/v1/models/{name}", ModelBody),
    ("/health", HealthBody),
)
"""Path and body of the answer of each page that is JSON."""
STATUSES = (
    "400",
    "401",
    "403",
    "404",
    "405",
    "408",
    "409",
    "413",
    "429",
    "431",
    "499",
    "500",
    "503",
    "504",
)
"""Statuses of failures."""
_REFERENCE = "#/components/schemas/{name}"


@functools.cache
def openapi_page() -> bytes:
    """Return the description as JSON."""
    kinds = [
        ErrorAnswer,
        *(kind for _, fields, body in POSTED for kind in (fields, body)),
        *(body for _, body in READ),
    ]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Tandem, OpenAI's API", "version": "1"},
            "paths": {**_posting(), **_reading()},
            "components": {"schemas": components},
        }
    )


def _posting() -> dict[str, Any]:
    return {
        path: {
            "post": {
                "requestBody": {"required": True, "content": _json(fields.__name__)},
                "responses": {
                    "200": _answer(body.__name__, streamed=path.startswith("/v1/")),
                    **_failures(),
                },
            }
        }
        for path, fields, body in POSTED
    }


def _reading() -> dict[str, Any]:
    paths: dict[str, Any] = {
        path: {"get": {"responses": {"200": _answer(body.__name__), **_failures()}}}
        for path, body in READ
    }
    paths["/v1/models/{name}"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    # A gateway without a scheduler says so in the form of one that has some.
    paths["/health"]["get"]["responses"]["503"] = _answer(HealthBody.__name__)
    for path, media_type in (("/metrics", "text/plain"), ("/openapi.json", "application/json")):
        text = {"type": "string" if media_type == "text/plain" else "object"}
        answer = {"description": path, "content": {media_type: {"schema": text}}}
        paths[path] = {"get": {"responses": {"200": answer, **_failures()}}}
    return paths


def _failures() -> dict[str, Any]:
    return dict.fromkeys(STATUSES, _answer(ErrorAnswer.__name__))


def _answer(name: str, *, streamed: bool = False) -> dict[str, Any]:
    content = _json(name)
    if streamed:
        content["text/event-stream"] = {}  # this version of OpenAPI has no schema of events
    return {"description": name, "content": content}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=name)}}}
