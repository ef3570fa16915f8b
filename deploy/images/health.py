"""
Health check for a container runtime that cannot call gRPC: `health.py ADDRESS [SERVICE]`.

The exit code is 0 if the service answers SERVING, otherwise 1 with one line that says why. In the
images it is the module `tandem_health`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

READY = "tandem.ready"
SERVING = health_pb2.HealthCheckResponse.SERVING


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask once, and return the exit code."""
    chosen = options(arguments)
    try:
        why = fault(chosen)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    if why is None:
        return 0
    sys.stderr.write(f"tandem_health: {chosen.address} {chosen.service!r}: {why}\n")
    return 1


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="tandem_health", description="Asks for health once.")
    parser.add_argument("address", metavar="HOST:PORT", help="gRPC address to ask")
    parser.add_argument(
        "service",
        nargs="?",
        default=READY,
        help=f"name to ask for; an empty one: is the process alive (default: {READY})",
    )
    parser.add_argument("--timeout-s", type=float, default=3.0, help="seconds (default: 3)")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="authorities, PEM; default: no TLS")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="certificate to show, PEM")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its private key, PEM")
    chosen = parser.parse_args(arguments)
    if chosen.ca is None and (chosen.cert or chosen.key):
        parser.error("--cert and --key need --ca")
    return chosen


def fault(chosen: argparse.Namespace) -> str | None:
    """
    Return what keeps the service from being healthy, or None.

    Raises:
        OSError: A file of certificates cannot be read.
    """
    request = health_pb2.HealthCheckRequest(service=chosen.service)
    with open_channel(chosen) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=chosen.timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def open_channel(chosen: argparse.Namespace) -> grpc.Channel:
    """Return a channel, over TLS if authorities are named; no proxy of the environment is asked."""
    options = [("grpc.enable_http_proxy", 0)]
    if chosen.ca is None:
        return grpc.insecure_channel(chosen.address, options)
    cert, key = (path.read_bytes() if path else None for path in (chosen.cert, chosen.key))
    credentials = grpc.ssl_channel_credentials(chosen.ca.read_bytes(), key, cert)
    return grpc.secure_channel(chosen.address, credentials, options)


if __name__ == "__main__":
    sys.exit(main())
