"""Renderings, made once for all tests of a process."""

from __future__ import annotations

import pytest

from tests.deploy.kubernetes.manifests import Document, KubectlMissing, Pod, pods, render_all
from tests.programs import is_missing


@pytest.fixture(scope="session")
def renderings() -> dict[str, list[Document]]:
    try:
        return render_all()
    except KubectlMissing as error:
        is_missing(str(error))


@pytest.fixture(scope="session")
def all_pods(renderings) -> list[Pod]:
    return [pod for name, documents in renderings.items() for pod in pods(name, documents)]
