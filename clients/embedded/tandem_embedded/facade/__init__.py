"""
Parts of the engine under the names of Hetero-Paged-Infer, for callers that drive them directly.

Each wraps the part that the engine itself uses: `KVCacheManager` the scheduler core's block pool,
`Scheduler` the core, `ModelExecutor` the model runner. In the other direction, `executor_backend`
lets an `InferenceEngine` run on any `GPUExecutorTrait`.
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
