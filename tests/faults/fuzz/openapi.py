"""Cases that schemathesis draws from /openapi.json, whose answers must be as that page says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as start_from
from schemathesis import APIOperation, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.faults.fuzz.cases import Case
from tests.faults.fuzz.judge import HANGS, LIMIT_S, PATIENT_S, End, Outcome, Verdict

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
"""
Properties of an answer: its status is listed, its body is of a listed type and has the schema's
form, and it refuses a body that the schema does not allow. Ranges are the scheduler's, so that it
may also refuse what the schema allows.
"""
SERVER_BUG = 500
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SHORT = 2
"""Output tokens of a request: most of what is accepted is not worth computing."""


def run_page(address: str, *, count: int, seed: int) -> Outcome:
    """
    Send cases of each operation of the page, one half of them valid, and check the answers.

    Args:
        address: Address of a gateway.
        count: Number of cases; each operation gets the same share, rounded up.
        seed: Seed of the cases.
    """
    load_all_checks()
    outcome, draw = Outcome(), random.Random(seed)
    url = f"http://{address}"
    with requests.Session() as session:
        session.trust_env = False
        page = session.get(f"{url}/openapi.json", timeout=LIMIT_S).json()
        schema = schemathesis.openapi.from_dict(page)
        strategies = [
            operation.as_strategy(generation_mode=mode)
            for operation in (found.ok() for found in schema.get_all_operations())
            for mode in _modes(operation)
        ]
        share = -(-count // len(strategies))
        suspects: list[Any] = []

        def check(case: Any) -> None:
            if isinstance(case.body, dict) and case.meta.generation.mode.is_positive:
                _tame(case.body, draw)
            end = _send(case, url, session, LIMIT_S)
            if end.verdict is Verdict.SUSPECT:
                suspects.append(case)
            else:
                outcome.note(end, _sent(case))

        for strategy in strategies:
            _run(strategy, check, share, seed)
        outcome.num_suspects = len(suspects)
        for case in suspects:
            outcome.note(_send(case, url, session, PATIENT_S), _sent(case))
    return outcome


def _modes(operation: APIOperation) -> tuple[GenerationMode, ...]:
    """Return the kinds of cases of an operation: without a body none is invalid."""
    if operation.body:
        return (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return (GenerationMode.POSITIVE,)


def _run(strategy: Any, check: Callable[[Any], None], count: int, seed: int) -> None:
    """Draw cases and check each; a failure is only noted, so that nothing is drawn twice."""
    once = settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    once(start_from(seed)(given(strategy)(check)))()


def _send(case: Any, url: str, session: requests.Session, limit_s: float) -> End:
    """Send a case and check its answer; one that does not come in time is a suspect."""
    try:
        answer = case.call(base_url=url, session=session, timeout=limit_s)
    except requests.RequestException as error:
        is_late = isinstance(error, requests.Timeout)
        return End(HANGS if is_late else type(error).__name__, Verdict.SUSPECT)
    end, is_bad = str(answer.status_code), answer.status_code == SERVER_BUG
    try:
        case.validate_response(answer, checks=CHECKS)
    except FailureGroup as failures:
        titles = ", ".join(type(one).__name__ for one in failures.exceptions)
        end, is_bad = f"{end} {titles}", True
    verdict = Verdict.BAD if is_bad else Verdict.GOOD
    return End(end, verdict, is_decoded="invalid_json" not in answer.text)


def _sent(case: Any) -> Case:
    return Case("http", f"{case.method} {case.path}", repr(case.body).encode(), is_stream=False)


def _tame(body: dict[str, Any], draw: random.Random) -> None:
    """Have a request that is accepted end soon, and name a model that is served, as a rule."""
    for name in LENGTHS:
        if isinstance(body.get(name), int):
            body[name] = SHORT
    if "messages" in body or "input" in body or "prompt" in body:
        body["max_tokens"] = SHORT
    if draw.random() < 0.9:
        body.pop("model", None)
