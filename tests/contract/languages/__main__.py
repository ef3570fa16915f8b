"""
Makes and compiles the stubs of every language, or of those named, and prints a table:
`python -m tests.contract.languages [go java typescript cpp rust csharp]`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.contract.languages.stubs import LANGUAGES, Stubs, StubsError, make_stubs, missing


def main(names: list[str]) -> int:
    """Print the table, and below it what went wrong; give 1 if anything did."""
    unknown = [name for name in names if name not in LANGUAGES]
    if unknown:
        print(f"not among {', '.join(LANGUAGES)}: {', '.join(unknown)}", file=sys.stderr)
        return 2
    said = []
    print("| language | messages | services | compiled | seconds |\n|---|---|---|---|---|")
    for name in names or LANGUAGES:
        why = missing(name)
        if why:
            said.append(why)
            print(f"| {name} | | | NOT RUN | |", flush=True)
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                print(row(name, make_stubs(name, Path(folder))), flush=True)
        except StubsError as error:
            said.append(str(error))
            print(f"| {name} | | | FAILED | |", flush=True)
    print(*said, sep="\n", end="\n" if said else "", file=sys.stderr)
    return int(bool(said))


def row(name: str, stubs: Stubs) -> str:
    """Return a line of the table."""
    compiled = "yes" if stubs.is_compiled else "not tried"
    services = str(stubs.services.total()) if LANGUAGES[name].service else "not tried"
    return f"| {name} | {stubs.messages.total()} | {services} | {compiled} | {stubs.seconds:.0f} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
