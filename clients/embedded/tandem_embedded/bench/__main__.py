"""`python -m tandem_embedded.bench offline [flags]`: whole engines side by side (see `offline`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tandem.printing_commands import run_printing
from tandem_embedded.bench import offline


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the first argument names; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem_embedded.bench", description=__doc__)
    parser.add_argument("benchmark", choices=["offline"])
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser.parse_args(given[:1])
    return offline.main(given[1:])


if __name__ == "__main__":
    sys.exit(run_printing("bench", main))
