"""Engine without a model, made from settings for the executor's server."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from executor_svc.model.files.tokenizer_files import TokenizerFile, read_tokenizer_files
from executor_svc.server.loaded import HEARTBEAT_INTERVAL_S, Engine
from tandem.executor.v1.executor_service_pb2 import DescribeResponse, GenerationDefaults
from tandem.link import PROTOCOL_VERSION
from tandem.link.slots.slot_state import SlotState
from tandem_bench.fixed_step.accounting import IdleAccount
from tandem_bench.fixed_step.runner import FixedStepRunner
from tandem_bench.fixed_step.settings import FixedStepSettings
from tandem_bench.fixed_step.tokens import ChainedTokens, vocab_size_of, words_of

_KV_BYTES_PER_BLOCK = 16 * 1024
"""Invented size of a KV block: no block holds anything."""


def load_fixed_step(settings: FixedStepSettings, boot_id: str, account: IdleAccount) -> Engine:
    """
    Build an engine; this takes next to no time.

    Raises:
        InvalidModel: The tokenizer cannot be used.
    """
    limits = settings.limits
    files = read_tokenizer_files(settings.tokenizer)
    num_slots = 2 * limits.max_batch_size
    slots = SlotState(
        num_slots,
        math.ceil(limits.max_model_len / limits.block_size),
        limits.block_size,
        limits.max_num_blocks,
    )
    runner = FixedStepRunner(
        slots,
        ChainedTokens(num_slots, words_of(files), settings.seed),
        account,
        boot_id=boot_id,
        step_ms=settings.step_ms,
    )
    return Engine(
        runner=runner,
        description=_describe(settings, files, num_slots=num_slots, boot_id=boot_id),
        tokenizer_files=files,
    )


def _describe(
    settings: FixedStepSettings, files: tuple[TokenizerFile, ...], *, num_slots: int, boot_id: str
) -> DescribeResponse:
    limits = settings.limits
    identity = hashlib.sha256(f"fixed-step seed={settings.seed}\n".encode())
    for file in files:
        identity.update(file.content)
    return DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        boot_id=boot_id,
        model_fingerprint=identity.hexdigest(),
        model_name="fixed-step",
        architecture="FixedStep",
        dtype="float32",
        vocab_size=vocab_size_of(files),
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=limits.max_num_blocks,
        num_slots=num_slots,
        max_batch_size=limits.max_batch_size,
        max_total_tokens=limits.max_total_tokens,
        max_inflight_steps=settings.max_inflight_steps,
        kv_bytes_per_block=_KV_BYTES_PER_BLOCK,
        eos_token_ids=np.empty(0, "<i4").tobytes(),
        generation_defaults=GenerationDefaults(temperature=1.0, top_k=0, top_p=1.0),
        device="cpu",
        features=["suspend"],
        heartbeat_interval_ms=int(HEARTBEAT_INTERVAL_S * 1000),
    )
