"""The app: its paths, and what they answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tandem.errors import TandemError
from tandem.http_server.encryption import newest_credentials
from tandem.network.grpc_wakeups import read_all_wakeups
from tandem_client.channel import ChannelOptions
from tandem_openai_gateway.answering import Answering, Endpoint
from tandem_openai_gateway.answers.chat import ChatFormat
from tandem_openai_gateway.answers.completion import CompletionFormat
from tandem_openai_gateway.answers.openapi import openapi_page
from tandem_openai_gateway.answers.pages import HealthBody, ModelBody, ModelList
from tandem_openai_gateway.answers.responses import ResponsesFormat
from tandem_openai_gateway.api.body import Bodies
from tandem_openai_gateway.api.chat import read_chat
from tandem_openai_gateway.api.completion import read_completion
from tandem_openai_gateway.api.headers import metadata_of
from tandem_openai_gateway.api.responses import read_responses
from tandem_openai_gateway.client_left import ClientLeft
from tandem_openai_gateway.delta_interval import DeltaIntervals
from tandem_openai_gateway.envelope import (
    Envelope,
    JsonResponse,
    on_api_error,
    on_bug,
    on_http_error,
    on_tandem_error,
)
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.metrics import CONTENT_TYPE, Metrics
from tandem_openai_gateway.scheduler_calls.schedulers import Schedulers
from tandem_openai_gateway.served_model import ServedModel
from tandem_openai_gateway.settings import Settings
from tandem_openai_gateway.tokenizing import Tokenizing
from tandem_openai_gateway.upstream import Model

ENDPOINTS = {
    "/v1/chat/completions": Endpoint(read=read_chat, form=ChatFormat),
    "/v1/completions": Endpoint(read=read_completion, form=CompletionFormat),
    "/v1/responses": Endpoint(read=read_responses, form=ResponsesFormat),
}
LEFT = 499
"""Status of a request whose client left before it was accepted, as nginx has it."""
CORS_MAX_AGE_S = 3600
EXPOSED_HEADERS = ("x-request-id", "retry-after", "retry-after-ms")


class Gateway:
    """
    State that the paths share. The connections are opened in the event loop of the server, when it
    starts, and closed when it stops.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._credentials = newest_credentials(settings)
        self._created_s = int(time.time())
        self._schedulers: Schedulers | None = None
        self._model: ServedModel | None = None
        self._answering: Answering | None = None
        self._tokenizing: Tokenizing | None = None
        self.metrics = Metrics(lambda: self._schedulers.num_ready if self._schedulers else 0)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Hold the connections while the server runs."""
        read_all_wakeups(asyncio.get_running_loop())
        self._schedulers = Schedulers(
            self._settings.schedulers,
            lambda: ChannelOptions(credentials=self._credentials()),
            joins_output=self._settings.min_delta_interval_s != 0,
            on_resume=self.metrics.resumes.inc,
        )
        self._model = ServedModel(self._schedulers)
        bodies = Bodies(self._settings.max_body_bytes)
        self._answering = Answering(
            self._schedulers,
            self._model,
            self.metrics,
            intervals=DeltaIntervals(self._settings.min_delta_interval_s),
            bodies=bodies,
        )
        self._tokenizing = Tokenizing(self._schedulers, self._model, bodies)
        try:
            yield
        finally:
            bodies.close()
            await self._schedulers.close()

    def generating(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return the handler of a path that generates."""

        async def handle(request: Request) -> ASGIApp:
            assert self._answering is not None
            return await self._answering.answer(endpoint, request)

        return handle

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JsonResponse(ModelList(data=[await self._described(request)]))

    async def model(self, request: Request) -> Response:
        """Describe the model with this name."""
        assert self._model is not None
        await self._model.check(request.path_params["name"], metadata_of(request))
        return JsonResponse(await self._described(request))

    async def tokenize(self, request: Request) -> Response:
        """Answer with the ids of a prompt."""
        assert self._tokenizing is not None
        return await self._tokenizing.tokenize(request)

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of ids."""
        assert self._tokenizing is not None
        return await self._tokenizing.detokenize(request)

    async def health(self, _request: Request) -> Response:
        """Say whether at least one scheduler serves requests."""
        assert self._schedulers is not None
        is_ready = self._schedulers.num_ready > 0
        body = HealthBody(
            status="ok" if is_ready else "unavailable",
            schedulers=dict(self._schedulers.readiness),
        )
        return JsonResponse(body, 200 if is_ready else 503)

    async def metrics_page(self, _request: Request) -> Response:
        """Return the metrics."""
        return Response(self.metrics.page(), media_type=CONTENT_TYPE)

    async def _described(self, request: Request) -> ModelBody:
        assert self._model is not None
        model: Model = await self._model.ask(metadata_of(request))
        return ModelBody(
            id=model.name,
            created=self._created_s,
            root=model.revision,
            max_model_len=model.max_model_len,
        )


def make_app(settings: Settings) -> ASGIApp:
    """Return the app for these settings."""
    gateway = Gateway(settings)
    routes = [
        Route(path, gateway.generating(endpoint), methods=["POST"])
        for path, endpoint in ENDPOINTS.items()
    ]
    routes += [
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.model),
        Route("/tokenize", gateway.tokenize, methods=["POST"]),
        Route("/detokenize", gateway.detokenize, methods=["POST"]),
        Route("/health", gateway.health),
        Route("/metrics", gateway.metrics_page),
        Route("/openapi.json", _openapi),
    ]
    paths = frozenset(route.path for route in routes)
    middleware = []
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
            max_age=CORS_MAX_AGE_S,
        )
        middleware.append(cors)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: on_api_error,
            TandemError: on_tandem_error,
            HTTPException: on_http_error,
            ClientLeft: _on_left,
            ClientDisconnect: _on_left,
            Exception: on_bug,
        },
        lifespan=gateway.lifespan,
    )
    return Envelope(app, gateway.metrics, paths)


async def _openapi(_request: Request) -> Response:
    return Response(openapi_page(), media_type="application/json")


async def _on_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=LEFT)  # for the metrics: no client is left to read it
