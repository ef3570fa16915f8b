"""A console that shows the scheduler a certificate, and one that shows the network all it sees."""

from __future__ import annotations

import grpc
import httpx
import pytest
from starlette.testclient import TestClient
from structlog.testing import capture_logs

from tandem_console.app import Console, make_app
from tandem_console.settings import Settings
from tests.certificates import Authority
from tests.clients.console.serving import console
from tests.clients.python.fake_server import fake_server

TOKEN = "a-token-of-an-operator"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def strict(authority):
    """A fake scheduler that asks for certificates, and for a token only if a test says so."""
    pair = authority.issue("scheduler")
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.certificate.read_bytes())],
        root_certificates=authority.file.read_bytes(),
        require_client_auth=True,
    )
    with fake_server(credentials) as running:
        yield running


@pytest.fixture
def http(strict, authority):
    """A browser at a console that has a certificate for this scheduler."""
    pair = authority.issue("console")
    files = {
        "scheduler_ca": authority.file,
        "scheduler_cert": pair.certificate,
        "scheduler_key": pair.key,
    }
    with (
        console(strict.address, **files) as url,
        httpx.Client(base_url=url, trust_env=False) as connected,
    ):
        yield connected


class TestCertificate:
    def test_it_vouches_for_no_browser(self, http, strict):
        """
        A browser without a session sees nothing, although the scheduler would serve the certificate.
        """
        answers = [http.get("/snapshot"), http.get("/events")]
        assert [401, 401] == [one.status_code for one in answers]
        assert {"UNAUTHENTICATED"} == {one.json()["error"]["reason"] for one in answers}
        assert not strict.seen.operator_tokens

    def test_token_is_proven_by_the_scheduler(self, http, strict):
        """
        Where the scheduler refuses unknown tokens, a known one opens a session.
        """
        strict.seen.operator_token = TOKEN
        assert 401 == http.post("/login", json={"token": "guessed"}).status_code
        assert 204 == http.post("/login", json={"token": TOKEN}).status_code
        assert 200 == http.get("/snapshot").status_code

    def test_token_that_proves_nothing_opens_nothing(self, http):
        """
        Where the scheduler takes any token beside the certificate, no login succeeds, and its answer says why.
        """
        answer = http.post("/login", json={"token": TOKEN})
        assert (403, "NO_TOKENS_ASKED") == (answer.status_code, answer.json()["error"]["reason"])
        assert "tokens file" in answer.json()["error"]["message"]
        assert 401 == http.get("/snapshot").status_code


class TestWarning:
    @pytest.mark.parametrize(("token", "num_warnings"), [(None, 1), (TOKEN, 0)])
    def test_console_that_serves_everyone_says_so_once(self, server, token, num_warnings):
        """
        A console that other machines reach, of a scheduler that asks for no token, warns at its first snapshot.
        """
        server.seen.operator_token = token
        app = make_app(Console(Settings(admin_address=server.address, listen="0.0.0.0:8081")))
        with capture_logs() as logged, TestClient(app, base_url="http://console.example") as client:
            for _ in range(2):
                client.get("/snapshot")
        warnings = [one for one in logged if one["event"] == "listening_unprotected"]
        assert num_warnings == len(warnings)
        assert all("nothing on it is authenticated" in one["message"] for one in warnings)
