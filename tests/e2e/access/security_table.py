"""
`python -m tests.e2e.access.security_table [--out FILE]`: the answer of each port of real services
to callers that it should not serve, as a page.

A stream of the tenant acme runs meanwhile: at the end it is there still, and the scheduler has the
session that it had, or the command fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.admin.v1 import admin_service_pb2, requests_pb2
from tandem.executor.v1 import session_pb2
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import stream_pb2
from tandem.link import PROTOCOL_VERSION
from tests import model_zoo
from tests.certificates import Authority
from tests.e2e.access.secured_system import (
    EXPIRED,
    LINK_TOKEN,
    METRICS_TOKEN,
    Connection,
    SecuredSystem,
)
from tests.scheduler_svc.frontend.identity.credentials import OPERATOR, OTHER, USER, bearer

PAGE = Path(__file__).with_name("security_table.md")
PORTS = ("public", "admin", "executor", "metrics", "gateway")
RIGHT_TOKEN = {
    "public": USER,
    "admin": OPERATOR,
    "executor": LINK_TOKEN,
    "metrics": METRICS_TOKEN,
    "gateway": USER,
}
TOKEN_OF_ANOTHER_PORT = dict.fromkeys(PORTS, USER) | {"public": OPERATOR, "gateway": OPERATOR}
INFERENCE, ADMIN, EXECUTOR = (
    "/tandem.inference.v1.InferenceService",
    "/tandem.admin.v1.AdminService",
    "/tandem.executor.v1.ExecutorService",
)
SIMPLE_CALL = {
    "public": f"{INFERENCE}/GetModel",
    "admin": f"{ADMIN}/GetStats",
    "executor": f"{EXECUTOR}/Describe",
}
SIMPLE_PATH = {"metrics": "/metrics", "gateway": "/v1/models"}
NOTES = {
    "a": "the gateway's HTTPS asks callers for no certificate: their keys tell who they are",
    "b": "nothing on this port has a tenant",
    "c": "requests over HTTP name no tenant: theirs is that of the key",
    "d": "the port has no such call",
    "e": "sessions belong to the executor's port",
    "f": "the gateway has no calls for operators, and ends a request only with its own connection",
}
NO_EXPIRY = {"executor": "n/a (h)", "metrics": "n/a (h)"}
VICTIM = pb.GenerateRequest(
    request_id="victim",
    attempt_key="key-of-the-victim",
    token_ids={"ids": [5, 6, 7]},
    sampling={"seed": 7},
    stopping={"max_tokens": 100, "ignore_eos": True},
)
"""Request of the tenant acme that runs while strangers try."""


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of caller, and the status that each port answers it with."""

    case: str
    cells: Mapping[str, str]


def simple(
    system: SecuredSystem, port: str, token: str | None, connection: Connection | None = None
) -> str:
    """Return the status of a harmless call of a port."""
    if port in SIMPLE_PATH:
        return system.get(port, SIMPLE_PATH[port], token, connection=connection)
    return system.call(port, SIMPLE_CALL[port], token, connection=connection)


def connection_rows(system: SecuredSystem) -> list[Row]:
    """Try ends of TLS, each with the token that the port asks for."""
    servers, clients, folder = system.servers_ca, system.clients_ca, system.folder
    wrong, mine = Authority(folder, "wrong-ca"), system.right.pair
    without_certificate = {
        "no client certificate": Connection(servers),
        "expired client certificate": Connection(servers, clients.issue_expired("expired")),
        "client certificate of another CA": Connection(servers, wrong.issue("stranger")),
    }
    cases = {
        "right certificate and token": system.right,
        "no TLS": Connection(None),
        "wrong CA": Connection(wrong, mine),
        **without_certificate,
    }
    return [
        Row(
            case,
            {port: simple(system, port, RIGHT_TOKEN[port], connection) for port in PORTS}
            | ({"gateway": "n/a (a)"} if case in without_certificate else {}),
        )
        for case, connection in cases.items()
    ]


def token_rows(system: SecuredSystem) -> list[Row]:
    """Try tokens over the right connection."""
    cases: dict[str, Mapping[str, str | None]] = {
        "no token": dict.fromkeys(PORTS),
        "wrong token": dict.fromkeys(PORTS, "a-token-that-is-wrong"),
        "expired token": dict.fromkeys(PORTS, EXPIRED),
        "token of another port": TOKEN_OF_ANOTHER_PORT,
    }
    return [
        Row(
            case,
            {port: simple(system, port, tokens[port]) for port in PORTS}
            | (NO_EXPIRY if case == "expired token" else {}),
        )
        for case, tokens in cases.items()
    ]


def take_over_rows(system: SecuredSystem) -> list[Row]:
    """Try to take the scheduler's session at its executor over."""
    request = session_pb2.OpenSessionRequest(
        protocol_version=PROTOCOL_VERSION,
        scheduler_name="stranger",
        scheduler_incarnation="1",
        take_over=True,
        lease_ms=60_000,
    ).SerializeToString()
    elsewhere = dict.fromkeys(PORTS, "n/a (e)")
    cases: dict[str, tuple[str | None, Connection | None]] = {
        "no client certificate": (LINK_TOKEN, Connection(system.servers_ca)),
        "no token": (None, None),
        "wrong token": ("a-token-that-is-wrong", None),
        "operator's token": (OPERATOR, None),
    }
    return [
        Row(
            f"session take-over, {case}",
            elsewhere
            | {
                "executor": system.call(
                    "executor", f"{EXECUTOR}/OpenSession", token, request, connection=connection
                )
            },
        )
        for case, (token, connection) in cases.items()
    ]


def tenant_rows(system: SecuredSystem, victim: stream_pb2.Started) -> list[Row]:
    """Try what a tenant may do to another one's request: here with the token of globex."""

    def asked(method: str, token: str = OTHER) -> Callable[..., str]:
        port = "admin" if method.startswith(ADMIN) else "public"
        return lambda message: system.call(port, method, token, message.SerializeToString())

    generate, abort = asked(f"{INFERENCE}/Generate"), asked(f"{INFERENCE}/Abort")
    operators_abort = asked(f"{ADMIN}/Abort")(
        requests_pb2.AbortRequest(request_id="victim", tenant="acme")
    )
    resume = pb.GenerateRequest()
    resume.CopyFrom(VICTIM)
    resume.sampling.CopyFrom(victim.sampling)
    resume.stopping.CopyFrom(victim.stopping)
    resume.resume.choices.add()
    resume_as_acme = pb.GenerateRequest(tenant="acme")
    resume_as_acme.MergeFrom(resume)
    nowhere = {"executor": "n/a (b)", "metrics": "n/a (b)", "gateway": "n/a (c)"}
    no_calls = nowhere | {"gateway": "n/a (f)"}
    listing = requests_pb2.ListRequestsRequest(tenant="acme").SerializeToString()
    stats = admin_service_pb2.GetStatsRequest().SerializeToString()
    return [
        Row(
            "request in another tenant's name",
            {"public": generate(pb.GenerateRequest(tenant="acme")), "admin": "n/a (d)"} | nowhere,
        ),
        Row(
            "abort of another tenant's request, by its id",
            {"public": abort(pb.AbortRequest(request_id="victim")), "admin": operators_abort}
            | no_calls,
        ),
        Row(
            "abort of another tenant's request, in its name",
            {
                "public": abort(pb.AbortRequest(request_id="victim", tenant="acme")),
                "admin": operators_abort,
            }
            | no_calls,
        ),
        Row(
            "resume of another tenant's stream, in its name",
            {"public": generate(resume_as_acme), "admin": "n/a (d)"} | nowhere,
        ),
        Row(
            "resume of another tenant's stream, in the own name",
            {"public": f"{generate(resume)} (g)", "admin": "n/a (d)"} | nowhere,
        ),
        Row(
            "listing of another tenant's requests",
            {
                port: system.call(port, f"{ADMIN}/ListRequests", OTHER, listing)
                for port in ("public", "admin")
            }
            | no_calls,
        ),
        Row(
            "admin call with a user's token",
            {"metrics": "n/a (d)", "gateway": "n/a (f)"}
            | {
                port: system.call(port, f"{ADMIN}/GetStats", token, stats)
                for port, token in (("public", USER), ("admin", USER), ("executor", LINK_TOKEN))
            },
        ),
    ]


def measured(system: SecuredSystem) -> list[Row]:
    """
    Try everything while a stream of acme runs.

    Raises:
        AssertionError: A stranger disturbed the stream or the executor's session.
    """
    with system.stubs() as (public, admin):
        with system.held():
            stream = public.Generate(VICTIM, metadata=bearer(USER))
            rows = [
                *connection_rows(system),
                *token_rows(system),
                *take_over_rows(system),
                *tenant_rows(system, next(stream).started),
            ]
            of_acme = requests_pb2.ListRequestsRequest(tenant="acme")
            listed = admin.ListRequests(of_acme, metadata=bearer(OPERATOR)).requests
            assert ["victim"] == [one.request_id for one in listed], "acme's request was ended"
            stats = admin.GetStats(admin_service_pb2.GetStatsRequest(), metadata=bearer(OPERATOR))
            assert 1 == stats.executor_sessions, "the session was taken over"
        ids = [id_ for message in stream for id_ in message.delta.token_ids]
    assert VICTIM.stopping.max_tokens == len(ids), "acme's stream lost tokens"
    return rows


def page_of(rows: list[Row]) -> str:
    """Return the page."""
    lines = [
        "# Security table",
        "",
        "Made by `python -m tests.e2e.access.security_table --out FILE`, and compared by",
        "`test_security_table.py`. Scheduler, executor and gateway are real processes; each port has",
        "a certificate, asks for client certificates where it can, and for a token. While strangers",
        "try, a stream of the tenant acme runs: it ends with all its tokens, and the scheduler keeps",
        "its session at the executor.",
        "",
        f"| caller | {' | '.join(PORTS)} |",
        f"|---|{'---|' * len(PORTS)}",
        *(f"| {row.case} | {' | '.join(row.cells[port] for port in PORTS)} |" for row in rows),
        "",
        '"No connection" and UNAVAILABLE are handshakes that fail: nothing of the call is read. n/a',
        "means not applicable, because:",
        "",
        *(f"- ({letter}) {text};" for letter, text in NOTES.items()),
        "- (g) is served as a request of the caller's own tenant, of ids that it has itself: the other",
        "  tenant's stream goes on, though `request_id` and `attempt_key` are the same;",
        "- (h) tokens of this port are lines of a file and do not expire: removing its line withdraws",
        "  one.",
        "",
        "The gateway's `/health`, `/metrics` and `/openapi.json`, and gRPC's health service on every",
        "port, need no token.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Print the page; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.access.security_table", description=__doc__
    )
    parser.add_argument("--out", type=Path, help="file for the page")
    given = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        model = model_zoo.llama_mha(Path(folder) / "tiny-llama")
        system = SecuredSystem(model, Path(folder))
        try:
            page = page_of(measured(system))
        finally:
            system.close()
    sys.stdout.write(page)
    if given.out is not None:
        given.out.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
