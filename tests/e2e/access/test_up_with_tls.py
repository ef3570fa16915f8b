"""`tandem up` with certificates and tokens: it serves, and every command reaches it."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import urllib.request

import pytest

from tests.certificates import Authority
from tests.e2e.cluster import ROOT, environment
from tests.e2e.test_commands import ANY_PORTS, announced, command, serving
from tests.scheduler_svc.frontend.identity.credentials import OPERATOR, USER, write_file
from tests.waiting import LIMIT_S

METRICS_TOKEN = "a-token-of-prometheus"


@pytest.fixture
def ca(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def config(tmp_path, ca):
    """A file for `tandem up` in which every port asks for all that it can ask for."""
    server, token = ca.issue("server"), tmp_path / "metrics-token"
    token.write_text(METRICS_TOKEN)
    file = tmp_path / "server.json"
    file.write_text(
        json.dumps(
            {
                "tls_cert": str(server.certificate),
                "tls_key": str(server.key),
                "tls_client_ca": str(ca.file),
                "tokens_file": str(write_file(tmp_path)),
                "metrics_tls_cert": str(server.certificate),
                "metrics_tls_key": str(server.key),
                "metrics_token_file": str(token),
            }
        )
    )
    return file


def ran(*arguments, token=None):
    """Run a command of `tandem` to its end; return its exit code and all that it printed."""
    outcome = subprocess.run(
        [sys.executable, "-m", "tandem_client", *map(str, arguments)],
        cwd=ROOT,
        env=environment() | ({"TANDEM_API_KEY": token} if token else {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return outcome.returncode, outcome.stdout + outcome.stderr


@pytest.mark.slow
def test_everything_asks_for_certificates_and_tokens_and_serves(tiny_model, config, ca, tmp_path):
    """
    `tandem up --openai` with TLS, client certificates and tokens becomes ready without any of its
    own; commands with them work, those without are refused; a drain ends it.
    """
    mine = ca.issue("mine", "127.0.0.1")
    files = [f"--ca={ca.file}", f"--cert={mine.certificate}", f"--key={mine.key}"]
    gateway = [
        f"--gateway-arg=--scheduler-{name}={path}"
        for name, path in (("ca", ca.file), ("cert", mine.certificate), ("key", mine.key))
    ]
    with command(
        "up", tiny_model, "--config", config, *ANY_PORTS, "--openai=127.0.0.1:0", *gateway
    ) as process:
        address = serving(process)
        said = announced(process)
        admin, http = said["operators"].strip(), said["OpenAI"].strip()
        where = [f"--address={address}"]
        operators = [f"--admin-address={admin}", *files]

        assert (
            "need --ca FILE, --cert FILE --key FILE, a token in TANDEM_API_KEY)" == said["(calls"]
        )
        code, text = ran("generate", "x", "--max-tokens=3", *where, *files, token=USER)
        assert 0 == code, text
        code, text = ran("generate", "x", *where, *files, token="wrong-token")
        assert 0 != code
        assert "UNAUTHENTICATED" in text
        code, text = ran("generate", "x", *where)
        assert "it speaks TLS: give --ca" in text
        for words in (["top", "--once", "--json"], ["requests"]):
            code, text = ran(*words, *operators, token=OPERATOR)
            assert 0 == code, text
        code, text = ran("doctor", "--server", *where, *operators, token=USER)
        assert f"{address} serves" in text

        trusted = ssl.create_default_context(cafile=ca.file)
        models = urllib.request.Request(
            f"{http}/models", headers={"Authorization": f"Bearer {USER}"}
        )
        with urllib.request.urlopen(models, context=trusted, timeout=LIMIT_S) as answer:
            assert "tiny-llama" in answer.read().decode()
        page = urllib.request.Request(
            said["metrics"].strip(), headers={"Authorization": f"Bearer {METRICS_TOKEN}"}
        )
        with urllib.request.urlopen(page, context=trusted, timeout=LIMIT_S) as answer:
            assert "tandem_" in answer.read().decode()

        code, text = ran("drain", *operators, token=OPERATOR)
        assert 0 == code, text
        _, errors = process.communicate(timeout=LIMIT_S)
        assert 0 == process.returncode, errors
        assert "drained" in errors


@pytest.mark.slow
def test_variables_of_a_secured_server_leave_a_server_of_one_command_alone(tiny_model, config):
    """
    `tandem generate --up` serves its one command, even if a configuration asks for certificates.
    """
    with command(
        "generate", "x", "--max-tokens=3", "--up", tiny_model, env={"TANDEM_CONFIG": str(config)}
    ) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
        assert 0 == process.returncode, errors


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["expired", "missing", "another key", "gateway"])
def test_wrong_certificate_is_one_sentence_before_the_start(tiny_model, ca, tmp_path, kind):
    """
    A certificate that cannot be used ends `tandem up` with one sentence that names its file.
    """
    good, expired, other = ca.issue("good"), ca.issue_expired("old"), ca.issue("other")
    pairs = {
        "expired": (expired.certificate, expired.key, f"{expired.certificate} cannot be used"),
        "missing": (tmp_path / "no.pem", good.key, f"cannot read the TLS file {tmp_path}/no.pem"),
        "another key": (good.certificate, other.key, f"{other.key} does not belong to"),
        "gateway": (good.certificate, good.key, "give --gateway-arg=--scheduler-ca=FILE"),
    }
    cert, key, sentence = pairs[kind]
    code, text = ran(
        *("up", tiny_model, f"--tls-cert={cert}", f"--tls-key={key}", *ANY_PORTS),
        *(["--openai=127.0.0.1:0"] if kind == "gateway" else []),
    )
    assert 2 == code
    assert sentence in text
    assert 1 == text.count("\n"), text
