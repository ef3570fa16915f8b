"""Certificates that are replaced while the gateway runs: its own, and those of its schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tandem.network.tls import server_credentials
from tandem.network.tls_files import ServerTls
from tests.certificates import Authority, Pair, first_certificate, shown_certificate
from tests.clients.openai_gateway.serving import gateway
from tests.clients.python.fake_server import ANSWER, Act, fake_server
from tests.waiting import wait_until

NUM_STREAMS = 64
NUM_ROTATIONS = 3


def served_by(ca: Authority, name: str):
    """Return a fake scheduler, to be entered, with a certificate of this CA."""
    pair = ca.issue(name)
    return fake_server(server_credentials(ServerTls(certificate=pair.certificate, key=pair.key)))


def copied(pair: Pair, to: Pair) -> None:
    """Write a pair over the files of another one, the key first."""
    to.key.write_bytes(pair.key.read_bytes())
    to.certificate.write_bytes(pair.certificate.read_bytes())


@contextlib.asynccontextmanager
async def opened(client: httpx.AsyncClient, url: str) -> AsyncIterator[AsyncIterator[str]]:
    """Yield the lines of a stream whose first text has come."""
    body = {"prompt": "hi", "stream": True}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert 200 == answer.status_code
        lines = answer.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                break
        yield lines


async def rest_of(lines: AsyncIterator[str]) -> str:
    """Return the text of a stream after its first event."""
    events = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
    assert "[DONE]" == events[-1]
    chunks = (json.loads(event)["choices"] for event in events[:-1])
    return "".join(choices[0]["text"] for choices in chunks if choices)


@pytest.mark.slow
async def test_streams_go_on_and_new_connections_see_the_new_one(start, tmp_path):
    """
    Of 64 HTTPS streams none fails while the gateway's certificate is replaced three times, and each
    new connection sees the newest one.
    """
    ca = Authority(tmp_path)
    pair, held, seen = ca.issue("gateway"), threading.Event(), set()
    trusting = ssl.create_default_context(cafile=ca.file)
    with fake_server() as scheduler:
        scheduler.play(Act(held=held))
        address = start(
            f"--scheduler={scheduler.address}",
            f"--tls-cert={pair.certificate}",
            f"--tls-key={pair.key}",
        )
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                httpx.AsyncClient(verify=trusting, trust_env=False, timeout=60)
            )
            streams = [
                await stack.enter_async_context(opened(client, f"https://{address}"))
                for _ in range(NUM_STREAMS)
            ]
            for _ in range(NUM_ROTATIONS):
                pair = ca.issue("gateway")
                found = await asyncio.to_thread(shown_certificate, address, trusting)
                assert first_certificate(pair.certificate) == found
                seen.add(found)
            held.set()
            texts = await asyncio.gather(*map(rest_of, streams))
    assert NUM_ROTATIONS == len(seen)
    assert {ANSWER[1:]} == set(texts)


def test_pair_that_does_not_belong_together_changes_nothing(start, tmp_path):
    """
    A certificate without its key is not used: new connections see the one before.
    """
    ca = Authority(tmp_path)
    pair = ca.issue("gateway")
    address = start(f"--tls-cert={pair.certificate}", f"--tls-key={pair.key}")
    trusting = ssl.create_default_context(cafile=ca.file)
    before = shown_certificate(address, trusting)
    pair.certificate.write_bytes(ca.issue("another").certificate.read_bytes())
    assert before == shown_certificate(address, trusting)


class TestSchedulers:
    @pytest.mark.slow
    def test_changed_ca_is_trusted_without_a_restart(self, tmp_path):
        """
        When the file of the schedulers' CA is replaced, a scheduler of the new CA becomes ready and
        one of the old CA unready, and a stream that runs at the latter goes on to its end.
        """
        old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
        ca_file, held = tmp_path / "schedulers.pem", threading.Event()
        ca_file.write_bytes(old.file.read_bytes())
        with served_by(old, "first") as first, served_by(new, "second") as second:
            first.play(Act(held=held))
            with (
                gateway(first.address, second.address, scheduler_ca=ca_file) as url,
                httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
            ):

                def readiness() -> dict[str, bool]:
                    return http.get("/health").json()["schedulers"]

                wait_until(lambda: readiness()[first.address], "the first scheduler")
                body = {"prompt": "hi", "stream": True}
                with http.stream("POST", "/v1/completions", json=body) as running:
                    lines = running.iter_lines()
                    next(lines)
                    ca_file.write_bytes(new.file.read_bytes())
                    wait_until(
                        lambda: {first.address: False, second.address: True} == readiness(),
                        "the new CA",
                    )
                    held.set()
                    text = "".join(lines)
                assert "[DONE]" in text
                answer = http.post("/v1/completions", json={"prompt": "hi"})
                assert ANSWER == answer.json()["choices"][0]["text"]
        assert (1, 1) == (len(first.seen.generate), len(second.seen.generate))

    @pytest.mark.slow
    def test_changed_client_certificate_is_shown_without_a_restart(self, tmp_path):
        """
        When the gateway's own certificate is replaced, schedulers that trust only the new one serve
        it.
        """
        ca, trusted = Authority(tmp_path), Authority(tmp_path, "trusted")
        pair = ca.issue("server")
        files = ServerTls(certificate=pair.certificate, key=pair.key, client_ca=trusted.file)
        mine = ca.issue("mine")
        with (
            fake_server(server_credentials(files)) as scheduler,
            gateway(
                scheduler.address,
                scheduler_ca=ca.file,
                scheduler_cert=mine.certificate,
                scheduler_key=mine.key,
            ) as url,
            httpx.Client(base_url=url, trust_env=False) as http,
        ):
            assert 503 == http.get("/health").status_code
            copied(trusted.issue("renewed"), mine)
            wait_until(lambda: 200 == http.get("/health").status_code, "the new certificate")

    @pytest.mark.parametrize("content", [b"", b"no certificate"], ids=["empty", "text"])
    def test_file_that_cannot_be_used_changes_nothing(self, tmp_path, content):
        """
        A file of CAs without one is not used, and connections stay as they are.
        """
        ca = Authority(tmp_path)
        ca_file: Path = tmp_path / "schedulers.pem"
        ca_file.write_bytes(ca.file.read_bytes())
        with (
            served_by(ca, "first") as scheduler,
            gateway(scheduler.address, scheduler_ca=ca_file) as url,
            httpx.Client(base_url=url, trust_env=False) as http,
        ):
            wait_until(lambda: 200 == http.get("/health").status_code, "the scheduler")
            ca_file.write_bytes(content)
            assert 200 == http.post("/v1/completions", json={"prompt": "hi"}).status_code
