"""The command that installs a part which is missing."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import tandem.installation
from tandem.installation import install_command

ROOT = Path(__file__).resolve().parents[2]


class TestInstallCommand:
    def test_checkout_installs_itself(self):
        """
        In a checkout the command names the checkout: nothing of ours is looked for in an index.
        """
        assert [sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[gateway]"] == shlex.split(
            install_command("gateway")
        )

    def test_installed_package_is_named(self, monkeypatch, tmp_path):
        """
        Elsewhere it names the package, quoted for a shell.
        """
        monkeypatch.setattr(tandem.installation, "__file__", str(tmp_path / "a/b/tandem/x.py"))
        assert install_command("gpu").endswith("-m pip install 'tandem-serve[gpu]'")
