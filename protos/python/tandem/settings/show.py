"""Printing of a service's settings without starting it, for its `show_config`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from tandem.errors import InvalidConfig
from tandem.process.exit_codes import EXIT_DONE, EXIT_REFUSED
from tandem.settings.presets import PRESET_SETTINGS
from tandem.settings.schema import Loaded, S


def show_settings(load: Callable[[Sequence[str], Mapping[str, str]], Loaded[S]]) -> int:
    """Print this process's settings as JSON, or the error in them; return the exit code."""
    try:
        loaded = load(sys.argv[1:], os.environ)
    except InvalidConfig as error:
        sys.stderr.write(f"{error.reason}: {error.message}\n")
        return EXIT_REFUSED
    warnings = loaded.settings.engine_config().warnings()
    report = {
        "settings": loaded.shown(),
        "warnings": warnings,
        "presets": {name: dict(values) for name, values in PRESET_SETTINGS.items()},
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return EXIT_DONE
