"""Limits of an executor: what gives way to the model and the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from executor_svc.config import load_settings
from executor_svc.limits import fit_limits
from executor_svc.model import ModelConfig
from tests.executor_svc.test_memory import LLAMA_7B

SMALL = dataclasses.replace(LLAMA_7B, num_layers=2, hidden_size=64, intermediate_size=64)


class TestStepOfACpu:
    @pytest.mark.parametrize(
        ("device", "config", "flags", "expected"),
        [
            ("cpu", SMALL, (), 4096),
            ("cpu", LLAMA_7B, (), 128),
            ("cpu", LLAMA_7B, ("--max-batch-size=300",), 300),
            ("cpu", LLAMA_7B, ("--max-total-tokens=2000",), 2000),
            ("cpu", LLAMA_7B, ("--preset=high-throughput",), 16384),
            ("cuda:0", LLAMA_7B, (), 4096),
        ],
        ids=["small", "large", "rows", "set", "preset", "gpu"],
    )
    def test_default_is_what_a_cpu_computes_in_seconds(
        self, device: str, config: ModelConfig, flags: tuple[str, ...], expected: int
    ):
        """
        On a CPU a large model's steps have fewer tokens, one for each sequence at least; a number
        from anywhere, and that of a GPU, stays.
        """
        loaded = load_settings(["--model=dir", *flags], {})
        found = fit_limits(loaded, config, torch.device(device))
        assert expected == found.max_total_tokens
