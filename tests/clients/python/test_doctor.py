"""Findings of `tandem doctor` on how a running server was set up."""

from __future__ import annotations

import json
from importlib import import_module

from typer.testing import CliRunner

from tandem_client.cli.app import app
from tests.clients.python.fake_server import PATIENCE_S

SETTINGS = [
    ("listen", '"0.0.0.0:50051"', "flag"),
    ("admin_listen", '"127.0.0.1:50052"', "default"),
    ("metrics_listen", "null", "flag"),
]


class TestSecurity:
    def test_server_that_others_can_reach_is_a_warning(self, server, monkeypatch):
        """
        Each address beyond loopback is warned about: nothing there is authenticated or encrypted.
        """
        monkeypatch.setattr("tests.clients.python.fake_server.SETTINGS", SETTINGS)
        doctor = import_module(
            "tandem_client.cli.doctor"
        )  # a name that its package gives a command
        monkeypatch.setattr(doctor, "check_torch", lambda: ())
        monkeypatch.setattr(doctor, "TIMEOUT_S", PATIENCE_S)
        address = ["--address", server.address, "--admin-address", server.address]
        found = json.loads(CliRunner().invoke(app, ["doctor", "--json", *address]).stdout)
        (warning,) = (one for one in found if one["subject"] == "security")

        assert "warn" == warning["verdict"]
        assert warning["fact"].startswith("listen 0.0.0.0:50051: other machines can reach")
