"""Facts on a benchmark's page about the machine it ran on."""

import os
import platform
from pathlib import Path


def machine() -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"
