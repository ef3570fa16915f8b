"""
Sizes of models that benchmarks fill with random weights.

This module needs no PyTorch, so that command lines can offer the names.
"""

from __future__ import annotations

from dataclasses import dataclass

ROPE_THETA = 500_000.0
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """
    Sizes of a Llama, with `qk_norm` of a Qwen3, with `qkv_bias` of a Qwen2.

    There are no other biases, no sliding window and no scaling of rotary positions.

    Attributes:
        head_dim: Features of a head.
        tied_embeddings: The embedding matrix is the output projection too.
        qk_norm: Queries and keys are normalised per head.
        qkv_bias: Queries, keys and values have biases.
        max_positions: Most tokens of a sequence.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    max_positions: int = 131072

    @property
    def architecture(self) -> str:
        """Architecture as config.json names it."""
        if self.qkv_bias:
            return "Qwen2ForCausalLM"
        return "Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"


MODEL_SIZES = {
    "tiny": ModelSizes(
        num_layers=2,
        hidden_size=128,
        intermediate_size=320,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=1024,
    ),
    "llama-135m": ModelSizes(
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
    ),
    "llama-360m": ModelSizes(
        num_layers=32,
        hidden_size=960,
        intermediate_size=2560,
        num_heads=15,
        num_kv_heads=5,
        head_dim=64,
        vocab_size=49152,
    ),
    "qwen3-0.6b": ModelSizes(
        num_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        qk_norm=True,
    ),
    "qwen3-4b": ModelSizes(
        num_layers=36,
        hidden_size=2560,
        intermediate_size=9728,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        qk_norm=True,
    ),
    "llama-1b": ModelSizes(
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128256,
    ),
    "llama-8b": ModelSizes(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        tied_embeddings=False,
    ),
}
"""
Sizes by name: a model for tests, then SmolLM2-135M and -360M, Qwen3-0.6B and -4B, Llama-3.2-1B and
Llama-3.1-8B as their config.json files give them, but without their scaling of rotary positions,
which costs nothing in a step.
"""
