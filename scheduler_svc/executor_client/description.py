"""Descriptions of executors: decoded and checked answers to Describe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.options import CoreOptions, Overlength
from scheduler_svc.ipc.messages import Model
from tandem.engine_config import EngineConfig
from tandem.errors import IncompatibleExecutor
from tandem.executor.v1.executor_service_pb2 import DescribeResponse
from tandem.link import MAX_STAGES, PROTOCOL_VERSION
from tandem.sampling_params import SamplingParams, broken_range, params_with_defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorDescription:
    """
    One boot of one executor; see tandem.executor.v1.DescribeResponse.

    `default_sampling` applies to sampling params that a request does not set: the model's own
    recommendation, else the public contract's default.
    """

    boot_id: str
    fingerprint: str
    model_name: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    geometry: ExecutorGeometry
    max_inflight_steps: int
    kv_bytes_per_block: int
    default_sampling: SamplingParams
    features: tuple[str, ...] = ()

    def model(self, tokenizer_dir: str, limits: EngineConfig, options: CoreOptions) -> Model:
        """Return what frontends need to know of the model, with the limits and options in force."""
        kv_tokens = limits.max_num_blocks * limits.block_size
        return Model(
            name=self.model_name,
            revision=self.fingerprint,
            architecture=self.architecture,
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=self.eos_token_ids,
            default_sampling=self.default_sampling,
            tokenizer_dir=tokenizer_dir,
            block_size=self.geometry.block_size if options.prefix_caching else 0,
            truncates=options.overlength is Overlength.TRUNCATE,
            kv_tokens=kv_tokens if kv_tokens < limits.max_model_len else None,
        )


def read_description(answer: DescribeResponse) -> ExecutorDescription:
    """
    Check and decode a Describe answer.

    Raises:
        IncompatibleExecutor: The protocol version is another, or a value is impossible.
    """
    _check(answer)
    return ExecutorDescription(
        boot_id=answer.boot_id,
        fingerprint=answer.model_fingerprint,
        model_name=answer.model_name,
        architecture=answer.architecture,
        dtype=answer.dtype,
        device=answer.device,
        vocab_size=answer.vocab_size,
        eos_token_ids=tuple(np.frombuffer(answer.eos_token_ids, "<i4").tolist()),
        geometry=ExecutorGeometry(
            num_blocks=answer.num_blocks,
            block_size=answer.block_size,
            num_slots=answer.num_slots,
            max_batch_size=answer.max_batch_size,
            max_total_tokens=answer.max_total_tokens,
            max_model_len=answer.max_model_len,
            num_host_blocks=answer.num_host_blocks,
            num_stages=answer.num_stages if answer.HasField("num_stages") else 1,
        ),
        max_inflight_steps=answer.max_inflight_steps,
        kv_bytes_per_block=answer.kv_bytes_per_block,
        default_sampling=params_with_defaults(
            {param.name: value for param, value in answer.generation_defaults.ListFields()}
        ),
        features=tuple(answer.features),
    )


def _check(answer: DescribeResponse) -> None:
    if answer.protocol_version != PROTOCOL_VERSION:
        raise IncompatibleExecutor(
            f"the executor speaks step protocol {answer.protocol_version}, this scheduler "
            f"{PROTOCOL_VERSION}: run both from the same release"
        )
    positive = (
        "vocab_size",
        "max_model_len",
        "block_size",
        "num_blocks",
        "num_slots",
        "max_batch_size",
        "max_total_tokens",
        "max_inflight_steps",
    )
    for name in positive:
        if getattr(answer, name) < 1:
            raise IncompatibleExecutor(f"the executor describes itself with {name} 0")
    if answer.HasField("num_stages") and not 1 <= answer.num_stages <= MAX_STAGES:
        raise IncompatibleExecutor(
            f"the executor describes itself with num_stages {answer.num_stages}, which is not from "
            f"1 to {MAX_STAGES}"
        )
    if not answer.boot_id or not answer.model_fingerprint:
        raise IncompatibleExecutor("the executor describes itself without boot or model identity")
    if len(answer.eos_token_ids) % 4:
        raise IncompatibleExecutor(
            "the executor describes itself with eos_token_ids that are not whole int32 tokens"
        )
    for descriptor, value in answer.generation_defaults.ListFields():
        rule = broken_range(descriptor.name, value)
        if rule is not None:  # every request that does not set it would be refused by the link
            raise IncompatibleExecutor(
                f"the executor describes its model with a default {descriptor.name} of {value:g}, "
                f"which {rule}"
            )
