"""
The parts of the engine under the names of Hetero-Paged-Infer, for those who drive them themselves.

Each stands on what the engine itself uses: `KVCacheManager` on the scheduler core's block pool,
`Scheduler` on the core, `ModelExecutor` on the model runner. `executor_backend` goes the other way
and lets an `InferenceEngine` run on anybody's `GPUExecutorTrait`.
"""

from tandem_embedded.facade.batches import ExecutionBatch, ExecutionOutput
from tandem_embedded.facade.execution import (
    GPUExecutorTrait,
    ModelExecutor,
    executor_backend,
)
from tandem_embedded.facade.kv_cache import KVCacheManager, KVCacheManagerTrait
from tandem_embedded.facade.scheduler import (
    Scheduler,
    SchedulerOutput,
    SchedulerTrait,
    Sequence,
)
from tandem_embedded.tokenizer import Tokenizer as TokenizerTrait

__all__ = [
    "ExecutionBatch",
    "ExecutionOutput",
    "GPUExecutorTrait",
    "KVCacheManager",
    "KVCacheManagerTrait",
    "ModelExecutor",
    "Scheduler",
    "SchedulerOutput",
    "SchedulerTrait",
    "Sequence",
    "TokenizerTrait",
    "executor_backend",
]
