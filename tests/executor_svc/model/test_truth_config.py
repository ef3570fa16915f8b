"""Spellings of config.json against transformers: the same logits, or a refusal."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tandem.errors import InvalidModel
from tests.executor_svc.stepping import Bench, Row, batch, forward_logits, random_tokens

TOLERANCE = 1e-4
"""Room for float32 sums in another order; logits here reach about 10."""

TOKENS = random_tokens(40, seed=1, vocab_size=61)

TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = (
    None,
    {},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 77.0},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2, "rope_theta": 50.0},
    {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 16},
    LLAMA3,
    {**LLAMA3, "original_max_position_embeddings": 16},
    {**LLAMA3, "original_max_position_embeddings": 48, "rope_theta": 300.0},
    {**LLAMA3, "attention_factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 2.0},
    {FULL: {"rope_type": "default", "rope_theta": 33.0}},
)
KEYS = st.fixed_dictionaries(
    {},
    optional={
        "num_key_value_heads": st.sampled_from([1, 4, None]),
        "head_dim": st.sampled_from([16, None]),
        "rope_theta": st.sampled_from([100.0, 500000, 10000.0]),
        "rope_scaling": st.sampled_from(ROPES),
        "rope_parameters": st.sampled_from(ROPES),
        "original_max_position_embeddings": st.sampled_from([8, 32]),
        "partial_rotary_factor": st.sampled_from([1.0, 1.0, 0.5]),
        "sliding_window": st.sampled_from([None, 5, 16]),
        "use_sliding_window": st.booleans(),
        "max_window_layers": st.sampled_from([0, 1, 9]),
        "layer_types": st.none()
        | st.lists(st.sampled_from([FULL, SLIDING]), min_size=3, max_size=3),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "rms_norm_eps": st.sampled_from([1e-6, 0.1]),
        "hidden_act": st.sampled_from(["silu", "swish"]),
        "max_position_embeddings": st.sampled_from([48, 128]),
        "per_layer_config": st.sampled_from([None, {}, {"1": {"sliding_window": 3}}]),
    },
)


def right_logits(directory: Path) -> torch.Tensor:
    """
    Let transformers build the model of a config.json, write its weights beside it, and compute.

    Raises:
        Exception: transformers cannot; of any class.
    """
    import transformers  # noqa: PLC0415  # takes seconds to import

    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases start at 0 and norms at 1: mistakes would not show
                torch.nn.init.normal_(parameter.data, 1.0 if "norm" in name else 0.0, 0.2)
    stored = dict(model.state_dict())
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    save_file(
        {name: each.clone() for name, each in stored.items()}, directory / "model.safetensors"
    )
    with torch.inference_mode():
        return model.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]


def our_logits(directory: Path) -> torch.Tensor:
    bench = Bench.build(directory, num_blocks=16, num_slots=1, max_model_len=48)
    admits = [bench.admit(0, TOKENS)]
    return forward_logits(bench.runner, batch(Row(0, 0, len(TOKENS)), admits=admits))


def compare(architecture: str, keys: Mapping[str, Any]) -> str:
    """
    Return a config.json's outcome: "equal", "refused", or "broken" if transformers fails on it.
    """
    config = {
        "architectures": [architecture],
        "model_type": TYPES[architecture],
        **SIZES,
        **keys,
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(config))
        try:
            right = right_logits(directory)
        except Exception:  # noqa: BLE001  # whatever it is, transformers gives no answer to compare
            return "broken"
        try:
            found = our_logits(directory)
        except InvalidModel:
            return "refused"
        worst = (right - found).abs().max().item()
        assert worst <= TOLERANCE, f"logits are off by {worst}: {config}"
        return "equal"


class TestSpellings:
    @pytest.mark.slow
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(st.sampled_from(list(TYPES)), KEYS)
    def test_every_spelling_is_computed_as_transformers_does_or_refused(
        self, architecture: str, keys: dict[str, Any]
    ):
        """
        Any config.json is refused or gives the logits that transformers computes from it.
        """
        assume(compare(architecture, keys) != "broken")

    @pytest.mark.parametrize(
        ("architecture", "keys"),
        [
            ("LlamaForCausalLM", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8}),
            (
                "LlamaForCausalLM",
                {
                    "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 48},
                    "original_max_position_embeddings": 8,
                    "rope_theta": 100.0,
                },
            ),
            (
                "LlamaForCausalLM",
                {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": ROPES[3]},
            ),
            ("MistralForCausalLM", {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 5}),
            ("MistralForCausalLM", {"layer_types": [FULL] * 3, "sliding_window": 5}),
            ("MistralForCausalLM", {"layer_types": None, "sliding_window": 5}),
            ("MinistralForCausalLM", {"layer_types": [SLIDING, FULL, FULL], "sliding_window": 5}),
            ("MistralForCausalLM", {"model_type": "ministral", "sliding_window": 5}),
            (
                "Qwen2ForCausalLM",
                {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            ),
            (
                "Qwen3ForCausalLM",
                {
                    "use_sliding_window": True,
                    "sliding_window": 5,
                    "max_window_layers": 0,
                    "layer_types": [FULL, SLIDING, FULL],
                },
            ),
            ("Qwen3ForCausalLM", {"use_sliding_window": False, "sliding_window": 5}),
            ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None}),
        ],
    )
    def test_windows_and_ropes_of_real_checkpoints_are_computed(
        self, architecture: str, keys: dict[str, Any]
    ):
        """
        layer_types, windows and the places of rope keys that checkpoints use give transformers' logits.
        """
        assert "equal" == compare(architecture, keys)

    @pytest.mark.parametrize(
        ("architecture", "keys"),
        [
            ("LlamaForCausalLM", {"model_type": "granite"}),
            ("LlamaForCausalLM", {"model_type": "smollm3"}),
            ("LlamaForCausalLM", {"model_type": "mistral", "sliding_window": 5}),
            ("MistralForCausalLM", {"model_type": "llama"}),
            ("Qwen2ForCausalLM", {"model_type": "llama"}),
            ("Qwen3ForCausalLM", {"model_type": "qwen2"}),
        ],
    )
    def test_a_model_type_of_another_family_is_refused(
        self, architecture: str, keys: dict[str, Any]
    ):
        """
        A model_type that is not the architecture's names what transformers would compute: we compute nothing then.
        """
        assert "refused" == compare(architecture, keys)
