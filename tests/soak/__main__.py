"""`tests/soak/run`: storms of one kind each, and a saturated service without faults."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import model_zoo
from tests.e2e.cluster import BUNDLED_MODEL
from tests.faults.kind_settings import settings_for
from tests.faults.processes.executors import Zygote
from tests.faults.processes.other_weights import with_other_weights
from tests.faults.processes.rig import Rig
from tests.faults.report import as_json, table
from tests.faults.schedule import Fault, Kind, make_schedule
from tests.faults.storm import Storm, StormFailed
from tests.faults.workload.reference import make_reference
from tests.soak.results import Results
from tests.soak.saturated import run_saturated

SECONDS_PER_KIND = 60.0
SATURATED_S = 600.0
_SHORTEST_FAULT_S = 0.9
"""Shortest time in seconds between faults of one kind."""


def main(argv: Sequence[str]) -> int:
    """Run what is asked for; 1 if a promise was broken."""
    options = _options(argv)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    zygote = None
    try:
        model = _model(options.model, folder)
        results = Results(options.results, options.model, options.seed)
        zygote = Zygote(_made(folder / "zygote"))
        reference = make_reference(_made(folder / "reference"), model, zygote)
        if options.saturated:
            seconds = options.seconds or SATURATED_S
            found = run_saturated(_made(folder / "saturated"), model, reference, zygote, seconds)
            results.add_saturated(found)
            sys.stdout.write(f"{found}\n")
            return int(bool(found["problems"]))
        kinds = [Kind[name.upper()] for name in options.kind] or list(Kind)
        other = with_other_weights(model, folder / "other")
        failures = 0
        for kind in kinds:
            seconds = options.seconds or SECONDS_PER_KIND
            storm_folder = _made(folder / kind.name.lower())
            rig = Rig(storm_folder, settings_for(kind, model), zygote)
            storm = Storm(rig=rig, reference=reference, seed=options.seed, other_weights=other)
            schedule = make_schedule(options.seed, [kind], int(seconds / _SHORTEST_FAULT_S) + 1)
            failures += not _storm(storm, schedule, seconds, kind, results)
        return int(failures > 0)
    finally:
        if zygote is not None:
            zygote.close()
        if options.keep:
            sys.stdout.write(f"logs are in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _storm(
    storm: Storm, schedule: Sequence[Fault], seconds: float, kind: Kind, results: Results
) -> bool:
    """Run one storm and return whether all promises held."""
    try:
        storm.rig.start()
        lines = storm.run(schedule, seconds)
    except StormFailed as error:
        sys.stdout.write(f"{kind}: FAILED\n{error}\n")
        results.add_storm(kind, seconds, {"failed": str(error).partition("\n")[0]})
        return False
    finally:
        storm.rig.close()
    sys.stdout.write(table(lines) + "\n")
    sys.stdout.flush()
    results.add_storm(kind, seconds, as_json(lines)[0])
    return True


def _options(argv: Sequence[str]) -> argparse.Namespace:
    names = ", ".join(kind.name.lower() for kind in Kind)
    parser = argparse.ArgumentParser(prog="tests/soak/run", description=__doc__)
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        help=f"only this one, more than once for several: {names}",
    )
    parser.add_argument(
        "--saturated", action="store_true", help="no fault: more load than there is room for"
    )
    parser.add_argument(
        "--seconds", type=float, help="for each kind (60), or for the saturated run (600)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the schedules")
    parser.add_argument("--model", choices=("bundled", "tiny"), default="bundled")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to add to"
    )
    parser.add_argument("--keep", action="store_true", help="keep the services' logs")
    return parser.parse_args(argv)


def _model(name: str, folder: Path) -> Path:
    return BUNDLED_MODEL if name == "bundled" else model_zoo.llama_mha(folder / "tiny-llama")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
