"""The gateway as a process: HTTPS, TLS to the scheduler, keys of a real scheduler, wrong flags."""

from __future__ import annotations

import ssl
import subprocess
import sys

import grpc
import httpx
import openai
import pytest

from tests.certificates import Authority
from tests.clients.openai_gateway.serving import gateway
from tests.clients.python.fake_server import ANSWER, fake_server
from tests.e2e.cluster import BUNDLED_MODEL, Cluster
from tests.scheduler_svc.frontend.identity.credentials import USER, write_file

BODY = {"prompt": "hi"}


class TestEncryption:
    def test_https_in_front_of_a_scheduler_with_tls(self, start, tmp_path):
        """
        With certificates both ways are encrypted, and the scheduler sees the gateway's own.
        """
        authority = Authority(tmp_path)
        pair, client = authority.issue("server"), authority.issue("client")
        credentials = grpc.ssl_server_credentials(
            [(pair.key.read_bytes(), pair.certificate.read_bytes())],
            authority.file.read_bytes(),
            require_client_auth=True,
        )
        with fake_server(credentials) as server:
            address = start(
                f"--scheduler={server.address}",
                f"--scheduler-ca={authority.file}",
                f"--scheduler-cert={client.certificate}",
                f"--scheduler-key={client.key}",
                f"--tls-cert={pair.certificate}",
                f"--tls-key={pair.key}",
            )
            url = f"https://{address}/v1/completions"
            answer = httpx.post(
                url,
                json=BODY,
                verify=ssl.create_default_context(cafile=authority.file),
                trust_env=False,
            )
        assert ANSWER == answer.json()["choices"][0]["text"]


class TestFlags:
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--scheduler=nowhere"], "nowhere"),
            (["--scheduler="], "scheduler"),
            (["--listen=nowhere"], "nowhere"),
            (["--tls-cert=/dev/null"], "tls_cert and tls_key"),
            (["--scheduler-ca=/none"], "/none"),
            (["--max-body-mib=0"], "max_body_mib"),
        ],
    )
    def test_wrong_one_is_refused_in_a_line(self, flags, said):
        """
        A flag that cannot work ends the process with exit code 2 and one line that names it.
        """
        command = [sys.executable, "-m", "tandem_openai_gateway", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert 2 == ended.returncode
        assert said in ended.stderr
        assert 1 == ended.stderr.count("\n"), ended.stderr


@pytest.mark.slow
class TestKeys:
    @pytest.fixture(scope="class")
    @staticmethod
    def url(tmp_path_factory):
        """A gateway in front of a scheduler that asks for credentials."""
        folder = tmp_path_factory.mktemp("keys")
        flags = [f"--tokens-file={write_file(folder)}"]
        cluster = Cluster(BUNDLED_MODEL, folder, [], flags)
        try:
            cluster.start_executor()
            with gateway(cluster.address) as served:
                yield f"{served}/v1"
        finally:
            cluster.close()

    def test_key_of_a_user_is_served(self, url):
        """
        The key of OpenAI's client is the bearer token of the scheduler's file.
        """
        with openai.OpenAI(base_url=url, api_key=USER) as client:
            (model,) = client.models.list().data
            assert client.completions.create(model=model.id, prompt="a", max_tokens=2).choices

    def test_other_keys_are_refused(self, url):
        """
        A key that is not in the file is 401, which OpenAI's client raises as such.
        """
        with (
            openai.OpenAI(base_url=url, api_key="guessed", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as refused,
        ):
            client.completions.create(model="tandem-py", prompt="a")
        assert "invalid_api_key" == refused.value.code
        assert "Bearer" == refused.value.response.headers["www-authenticate"]

    def test_higher_priority_than_allowed_is_403(self, url):
        """
        A priority above what the key allows is a matter of permission.
        """
        with (
            openai.OpenAI(base_url=url, api_key=USER, max_retries=0) as client,
            pytest.raises(openai.PermissionDeniedError),
        ):
            client.completions.create(model="tandem-py", prompt="a", extra_body={"priority": -100})
