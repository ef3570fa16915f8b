"""
Program `python -m scheduler_svc.show_config [flags]`: prints the settings that the service would
run with, as JSON, without starting it. Takes the service's flags, files and environment.
"""

from __future__ import annotations

import sys

from scheduler_svc.config.settings import load_settings
from tandem.settings.show import show_settings

if __name__ == "__main__":
    sys.exit(show_settings(load_settings))
