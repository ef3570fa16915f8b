"""Random input at every port gets typed answers: no bug, no hang, no service that ends."""

from __future__ import annotations

import pytest

from tests.faults.fuzz.__main__ import HTTP, OPENAPI, TCP, find_problems, run_kind
from tests.faults.fuzz.cases import KINDS
from tests.faults.fuzz.services import Services

CASES = 2_500
"""Cases of each kind: with those of the page of the API more than 10,000 in all."""
PAGE_CASES = 150
"""Cases of the page of the API: 10 of each operation that are valid, and as many that are not."""


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    services = Services(tmp_path_factory.mktemp("fuzz"))
    yield services
    services.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, HTTP, TCP])
async def test_random_input_gets_a_typed_answer(services, kind):
    """
    No case fails INTERNAL or UNKNOWN or hangs, at least half of them get past decoding, no log says
    an error, and the service serves afterwards.
    """
    outcome = await run_kind(services, kind, CASES, seed=1)
    assert [] == find_problems(services, outcome)
    assert sum(outcome.ends.values()) == CASES


@pytest.mark.slow
async def test_openapi_page_is_true(services):
    """
    Each answer to a case drawn from /openapi.json has a status, a type and a body that the page
    lists, and is never 500; a body that the page does not allow is refused.
    """
    outcome = await run_kind(services, OPENAPI, PAGE_CASES, seed=1)
    assert [] == find_problems(services, outcome)
    assert outcome.ends["200"]
    assert outcome.ends["400"]
