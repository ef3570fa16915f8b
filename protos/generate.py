"""
Regenerate the Python code of every .proto file and the table of the services' options, or with
--check prove that what is committed is what they generate.

Run from anywhere: `python protos/generate.py [--check]`.
"""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
PACKAGE = PROTOS / "python"
OPTIONS = Path("tandem/settings/options.json")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(target: Path) -> None:
    """Write the generated modules of all protos below `target`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("tandem/**/*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={well_known}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *sources,
        ]
    )
    if status != 0:
        sys.exit(status)
    for grpc_module in target.rglob("*_pb2_grpc.py"):
        if "_service" not in grpc_module.name:
            grpc_module.unlink()  # files without a service generate an empty module


def write_options(target: Path) -> None:
    """Write the options that the services declare below `target`."""
    # The modules that the services import may have just been generated.
    from executor_svc.config.settings import PROGRAM as EXECUTOR  # noqa: PLC0415  # see above
    from scheduler_svc.config.settings import PROGRAM as SCHEDULER  # noqa: PLC0415  # see above
    from tandem.settings.options import as_json  # noqa: PLC0415  # see above

    table = target / OPTIONS
    table.parent.mkdir(parents=True, exist_ok=True)
    text = as_json({"executor": EXECUTOR.table, "scheduler": SCHEDULER.table})
    table.write_text(text, encoding="utf-8")


def generated_files(root: Path) -> set[Path]:
    """Generated modules, and the table of options, below `root`, relative to it."""
    suffixes = (*SUFFIXES, OPTIONS.name)
    return {path.relative_to(root) for path in root.rglob("*") if path.name.endswith(suffixes)}


def check() -> int:
    """Compare a fresh generation with the committed one; 0 if they are the same."""
    with tempfile.TemporaryDirectory() as fresh_name:
        fresh = Path(fresh_name)
        generate(fresh)
        write_options(fresh)
        expected, committed = generated_files(fresh), generated_files(PACKAGE)
        wrong = [str(path) for path in sorted(expected ^ committed)]
        wrong += [
            str(path)
            for path in sorted(expected & committed)
            if not filecmp.cmp(fresh / path, PACKAGE / path, shallow=False)
        ]
    for path in wrong:
        print(f"stale: protos/python/{path}", file=sys.stderr)
    if wrong:
        print("run `python protos/generate.py` and commit the result", file=sys.stderr)
    return 1 if wrong else 0


def main() -> int:
    """Generate, or check with --check."""
    if sys.argv[1:] == ["--check"]:
        return check()
    for stale in generated_files(PACKAGE):
        (PACKAGE / stale).unlink()
    generate(PACKAGE)
    write_options(PACKAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
