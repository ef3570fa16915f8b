"""The names that users of Hetero-Paged-Infer know, and what each must be able to do."""

from __future__ import annotations

import dataclasses

import pytest

import tandem_embedded
from tandem_embedded import (
    EngineConfig,
    GPUExecutorTrait,
    KVCacheManager,
    KVCacheManagerTrait,
    ModelExecutor,
    Scheduler,
    SchedulerTrait,
    SimpleTokenizer,
    TokenizerTrait,
)

METHODS = {
    "InferenceEngine": "submit_request run step has_pending_work get_memory_stats get_metrics",
    "EngineConfig": "validate from_file",
    "GenerationParams": "validate",
    "SimpleTokenizer": "encode decode",
    "TokenizerTrait": "encode decode",
    "Scheduler": "add_request schedule update_sequences get_completed has_pending_work",
    "SchedulerTrait": "add_request schedule update_sequences get_completed has_pending_work",
    "KVCacheManager": "allocate_sequence allocate_block free_sequence get_block_table "
    "get_memory_stats can_allocate",
    "KVCacheManagerTrait": "allocate_sequence allocate_block free_sequence get_block_table "
    "get_memory_stats can_allocate",
    "GPUExecutorTrait": "execute capture_decode_graph execute_graph",
}
FIELDS = {
    "EngineConfig": "block_size max_num_blocks max_batch_size max_num_seqs max_model_len "
    "max_total_tokens memory_threshold",
    "GenerationParams": "max_tokens temperature top_p",
    "Request": "request_id input_tokens output_tokens max_tokens temperature top_p state created_at",
    "RequestState": "PENDING PREFILL DECODE COMPLETED FAILED",
    "Sequence": "seq_id request logical_blocks num_computed_tokens num_generated_tokens",
    "CompletedRequest": "request_id output_text output_tokens generated_tokens success error",
    "SchedulerOutput": "prefill_sequences decode_sequences total_tokens",
    "ExecutionBatch": "input_tokens positions seq_lens block_tables is_prefill seq_ids context_lens",
    "ExecutionOutput": "next_tokens seq_ids",
    "MemoryStats": "total_blocks used_blocks free_blocks num_sequences",
    "EngineMetrics": "total_requests completed_requests failed_requests total_tokens_generated "
    "memory_utilization active_sequences",
    "EngineError": "message reason prefix",
}
SPECIFIED = sorted({*METHODS, *FIELDS})


def has(name: str, attribute: str) -> bool:
    """Return whether an export has an attribute, on the class or on its instances."""
    kind = getattr(tandem_embedded, name)
    fields = (
        {one.name for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else ()
    )
    return hasattr(kind, attribute) or attribute in fields


class TestExports:
    def test_every_specified_name_is_exported(self):
        """
        The twenty types of the specification can be imported from the package.
        """
        assert 20 == len(SPECIFIED)
        assert [] == [name for name in SPECIFIED if name not in tandem_embedded.__all__]
        assert [] == [
            name for name in tandem_embedded.__all__ if not hasattr(tandem_embedded, name)
        ]

    @pytest.mark.parametrize("name", METHODS)
    def test_every_specified_method_can_be_called(self, name):
        """
        Each type has the methods that the specification gives it.
        """
        kind = getattr(tandem_embedded, name)
        assert [] == [
            one for one in METHODS[name].split() if not callable(getattr(kind, one, None))
        ]

    @pytest.mark.parametrize("name", FIELDS)
    def test_every_specified_field_is_there(self, name):
        """
        Each value has the fields that the specification gives it.
        """
        if name == "EngineError":
            error = tandem_embedded.EngineError("what")
            assert all(hasattr(error, one) for one in FIELDS[name].split())
        else:
            assert [] == [one for one in FIELDS[name].split() if not has(name, one)]

    def test_what_is_ours_has_the_shape_of_its_trait(self, tmp_path):
        """
        Scheduler, KV cache manager, executor and tokenizer are what their traits ask for; mypy
        checks the signatures.
        """
        scheduler: SchedulerTrait = Scheduler(EngineConfig())
        manager: KVCacheManagerTrait = KVCacheManager(EngineConfig())
        tokenizer: TokenizerTrait = SimpleTokenizer()
        kind: type[GPUExecutorTrait] = ModelExecutor
        assert not scheduler.has_pending_work()
        assert manager.can_allocate(1024)
        assert not manager.can_allocate(1025)
        assert "hi" == tokenizer.decode(tokenizer.encode("hi"))
        assert callable(kind.execute)
