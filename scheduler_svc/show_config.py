"""
`python -m scheduler_svc.show_config [flags]`: print the settings that the service would run with,
as JSON, without starting it. Takes the service's flags, files and environment.
"""

from __future__ import annotations

import os
import sys

import msgspec

from scheduler_svc.config_sources import load_settings
from tandem.errors import InvalidConfig


def main() -> int:
    """Print the settings, or what is wrong with them; the exit code is the service's own."""
    try:
        loaded = load_settings(sys.argv[1:], os.environ)
    except InvalidConfig as error:
        sys.stderr.write(f"{error.reason}: {error.message}\n")
        return 2
    entries = [
        {"name": entry.name, "value": msgspec.json.decode(entry.json_value), "source": entry.source}
        for entry in loaded.in_force(None).entries
    ]
    warnings = loaded.settings.engine_config().warnings()
    report = {"settings": entries, "warnings": warnings}
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
