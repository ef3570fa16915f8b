"""Half a billion parameters in the shapes of three families: what a small real model is like."""

from __future__ import annotations

from tandem_bench.device.sizes import ModelSizes

HALF_A_BILLION = {
    "llama-0.5b": ModelSizes(
        num_layers=24,
        hidden_size=1024,
        intermediate_size=5632,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=32000,
        max_positions=131072,
    ),
    "qwen2-0.5b": ModelSizes(
        num_layers=24,
        hidden_size=896,
        intermediate_size=4864,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151936,
        qkv_bias=True,
        max_positions=32768,
    ),
    "qwen3-0.5b": ModelSizes(
        num_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=65536,
        qk_norm=True,
        max_positions=16384,
    ),
}
"""
Shapes by name: the second is Qwen2.5-0.5B's, the third Qwen3-0.6B's with fewer words and positions.
"""
