"""A frontend that serves a small byte-level model for a core that the test plays."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_svc.config.frontend_security import FrontendSecurity
from tandem.inference.v1 import inference_service_pb2_grpc
from tests.scheduler_svc.frontend.fake_core import Frontend, model, running_frontend, serve
from tests.scheduler_svc.frontend.identity.credentials import write_file
from tests.scheduler_svc.frontend.small_models import save_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
async def frontend(tmp_path: Path, model_dir: Path) -> AsyncIterator[Frontend]:
    async with running_frontend(tmp_path) as running:
        await serve(running, model(model_dir))
        yield running


@pytest.fixture
async def secured(tmp_path: Path, model_dir: Path) -> AsyncIterator[Frontend]:
    """A frontend whose callers need tokens."""
    security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
    async with running_frontend(tmp_path, security=security) as frontend:
        await serve(frontend, model(model_dir))
        yield frontend


@pytest.fixture
def stub(frontend: Frontend):
    return inference_service_pb2_grpc.InferenceServiceStub(frontend.channel)
