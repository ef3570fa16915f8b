"""Limits of an executor: what gives way to the model and the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from executor_svc.config.limits import fit_limits
from executor_svc.config.settings import load_settings
from executor_svc.model.config import ModelConfig
from tandem.errors import InvalidConfig
from tests.executor_svc.memory.test_kv_memory import LLAMA_7B

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


class TestModelShorterThanABlock:
    def test_refusal_names_the_model_and_the_block(self):
        """
        A model shorter than one block is refused with an error that says so and how to go on.
        """
        short = dataclasses.replace(SMALL, max_position_embeddings=8)
        with pytest.raises(InvalidConfig) as caught:
            fit_limits(load_settings(["--model=dir"], {}), short, torch.device("cpu"))
        assert (
            "the model supports at most 8 tokens (max_position_embeddings), less than one block of "
            "block_size 16: lower block_size to 8 or less"
        ) == caught.value.message

    def test_smaller_blocks_serve_it(self):
        """
        With the advised block size the same model is served at its length.
        """
        short = dataclasses.replace(SMALL, max_position_embeddings=8)
        loaded = load_settings(["--model=dir", "--block-size=8"], {})
        assert 8 == fit_limits(loaded, short, torch.device("cpu")).max_model_len
