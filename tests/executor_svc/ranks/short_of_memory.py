"""
The real executor, whose rank 1 has no memory for a step of more tokens than a file allows, nor on
its host for a suspension with OFFLOAD while that file exists.

    LIMIT_FILE=FILE python -m tests.executor_svc.ranks.short_of_memory ARGUMENTS OF executor_svc

While the file does not exist any step has the memory that it needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch import Tensor, cuda

import executor_svc.__main__ as executor_main
import executor_svc.engine as executor_engine
import executor_svc.memory.kv_memory as executor_kv_memory
from executor_svc.device.queue import Mark
from executor_svc.step.runner import ModelRunner
from tandem.link.batch import Batch
from tandem.link.commands import KvMode


class ShortRunner(ModelRunner):
    """A runner that fails as PyTorch does where the device has no memory left."""

    def _forward(self, batch: Batch) -> tuple[Mark, Tensor]:
        if _is_short() and int(batch.row_num_tokens.sum()) > int(_limit_file().read_text()):
            raise cuda.OutOfMemoryError("no memory for so many tokens")
        return super()._forward(batch)

    def suspend(self, mode: KvMode) -> None:
        if _is_short():
            vars(executor_kv_memory)["available_bytes"] = lambda _device: 0
        super().suspend(mode)


def _is_short() -> bool:
    return os.environ["LWS_WORKER_INDEX"] == "1" and _limit_file().exists()


def _limit_file() -> Path:
    return Path(os.environ["LIMIT_FILE"])


if __name__ == "__main__":
    vars(executor_engine)["ModelRunner"] = ShortRunner
    sys.exit(executor_main.main(sys.argv[1:]))
