"""Exit codes of services, of the embedded engine, the simulator and the benchmarks."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
"""
Exit code for flags, a configuration, a model or a machine that cannot work; running it again will
not help.
"""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
