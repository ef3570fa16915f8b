"""More load than there is room for, without a fault: nothing fails, and readiness stays on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tandem_client import RetryPolicy
from tests.faults.leaks import find_leaks, holdings
from tests.faults.logs import find_problems
from tests.faults.processes.executors import Zygote
from tests.faults.processes.rig import Rig, RigSettings
from tests.faults.readiness import ReadinessWatch
from tests.faults.workload.reference import Reference
from tests.faults.workload.streams import Streams

COPIES = 3
"""Number of workers that ask for each request at the same time."""
_ROOM = ("--max-batch-size=48", "--max-num-blocks=700")
_PATIENT = RetryPolicy(max_attempts=100_000, max_delay_s=1.0)


def run_saturated(
    folder: Path, model: Path, reference: Reference, zygote: Zygote, seconds: float
) -> dict[str, Any]:
    """
    Keep every slot and block busy for so long; gives what happened.

    `problems` has every broken promise: a request that failed or said something else, readiness
    that turned off, leaks, tracebacks.
    """
    settings = RigSettings(model=model, executor=_ROOM, scheduler=("--memory-threshold=1",))
    rig = Rig(folder, settings, zygote)
    watch = None
    streams = None
    try:
        rig.start()
        streams = Streams(rig.address, reference.requests * COPIES, _PATIENT)
        streams.begin(once=True)
        streams.end(600)
        rig.wait_idle()
        before = holdings(rig.services())
        watch = ReadinessWatch(rig.address)
        streams.begin()
        time.sleep(seconds)
        streams.end(600)
        stats = rig.wait_idle()
        watch.close()
        problems = [problem for run in streams.runs for problem in reference.problems(run)]
        problems += [f"readiness turned off {off} times" for off in [watch.num_times_off()] if off]
        problems += find_leaks(before, rig.services()) + find_problems(rig.logs())
        longest = max((gap.end_s - gap.begin_s for gap in streams.gaps), default=0.0)
        return {
            "seconds": seconds,
            "streams": len(reference.requests) * COPIES,
            "requests": len(streams.runs),
            "steps": stats.steps,
            "output_tokens": stats.output_tokens,
            "preemptions": stats.preemptions,
            "readiness_turned_off": watch.num_times_off(),
            "longest_silence_s": round(longest, 2),
            "problems": problems[:20],
        }
    finally:
        if watch is not None:
            watch.close()
        if streams is not None:
            streams.close()
        rig.close()
