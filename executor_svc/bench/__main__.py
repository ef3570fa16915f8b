"""
`python -m executor_svc.bench kernels|model|roofline [flags]`: what the executor's parts take on
this machine, and how near that is to what the machine could do.
"""

from __future__ import annotations

import importlib
import os
import sys

from executor_svc.device.idle_threads import let_idle_threads_sleep
from tandem.errors import TandemError
from tandem.printing_commands import run_printing
from tandem.process_start import refuse

_MODULES = {
    "kernels": "executor_svc.bench.kernels",
    "model": "executor_svc.bench.decode_steps",
    "roofline": "executor_svc.bench.roofline",
}
_EXIT_USAGE = 2


def main() -> int:
    """Run the benchmark that the first argument names; gives the exit code."""
    names = sys.argv[1:2]
    if not names or names[0] not in _MODULES:
        sys.stderr.write(f"usage: python -m executor_svc.bench {'|'.join(_MODULES)} [flags]\n")
        return _EXIT_USAGE
    let_idle_threads_sleep(os.environ)
    module = importlib.import_module(_MODULES[names[0]])  # imports PyTorch: seconds
    try:
        code: int = module.main(sys.argv[2:])
    except TandemError as error:
        return refuse(error)
    return code


if __name__ == "__main__":
    sys.exit(run_printing("bench", main))
