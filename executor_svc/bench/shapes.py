"""Models by their sizes alone: what benchmarks fill with random weights."""

from __future__ import annotations

from executor_svc.model import GenerationDefaults, ModelConfig
from executor_svc.model.rope import Rope


def _decoder(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inner: int,
    vocab: int,
    tied: bool = True,
    qk_norm: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        max_position_embeddings=131072,
        rope=Rope(theta=500_000.0),
        windows=(None,) * layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=qk_norm,
        tied_embeddings=tied,
        checkpoint_dtype="bfloat16",
        eos_token_ids=(),
        generation_defaults=GenerationDefaults(),
    )


SHAPES: dict[str, ModelConfig] = {
    "tiny": _decoder(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, inner=320, vocab=1024),
    "135m": _decoder(
        layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, inner=1536, vocab=49152
    ),
    "qwen3-0.6b": _decoder(
        layers=28,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        inner=3072,
        vocab=151936,
        qk_norm=True,
    ),
    "llama-1b": _decoder(
        layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192, vocab=128256
    ),
    "llama-8b": _decoder(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        inner=14336,
        vocab=128256,
        tied=False,
    ),
}
"""
By name: a model for tests, a SmolLM-135M, a Qwen3-0.6B, a Llama-3.2-1B and a Llama-3.1-8B, as their
config.json files give them but for how positions are stretched, which costs nothing in a step.
"""
