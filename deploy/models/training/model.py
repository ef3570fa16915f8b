"""
The Llama architecture in plain torch, numerically the one of Hugging Face ``transformers``.

Parameter names equal those of ``LlamaForCausalLM`` so that exporting is a plain copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the model; lengths are in tokens, the other sizes in channels."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square in fp32, then by a learned weight ``[D]``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of ``x``; keeps its dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


class KvCache:
    """Keys and values ``[B, K, T, d]`` of the tokens one layer has seen; grows as it is used."""

    def __init__(self) -> None:
        self.length = 0
        self._key = self._value = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the newest tokens and return all there are."""
        if self.length:
            key = torch.cat([self._key, key], dim=2)
            value = torch.cat([self._value, value], dim=2)
        self._key, self._value, self.length = key, value, key.shape[2]
        return key, value


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None = None) -> Tensor:
        """Attend in ``x [B, T, D]`` and what came before; tables are ``[T, head_dim]``."""
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query = rotate(query, cos, sin) * self.head_dim**-0.5
        key = rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.extend(key, value)
            mixed = attend(query, key, value)
        else:
            mixed = attend_in_halves(query, key, value)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., D]`` to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None = None) -> Tensor:
        """Map ``x [B, T, D]`` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and last norm; the prefix ``model.`` of the exported names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The language model; the output matrix is the embedding itself."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def hidden(self, ids: Tensor, caches: list[KvCache] | None = None) -> Tensor:
        """Return the normed last hidden state ``[B, T, D]`` for ids ``[B, T]``."""
        x = self.model.embed_tokens(ids)
        start = caches[0].length if caches else 0
        end = start + ids.shape[1]
        cos, sin = self.cos[start:end].to(x.dtype), self.sin[start:end].to(x.dtype)
        for position, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, caches[position] if caches else None)
        out: Tensor = self.model.norm(x)
        return out

    def forward(self, ids: Tensor, caches: list[KvCache] | None = None) -> Tensor:
        """
        Return logits ``[B, T, V]`` for ids ``[B, T]``.

        Args:
            ids: New tokens; with those before them at most ``max_position_embeddings``.
            caches: One per layer, all of the same length, to continue; None starts afresh.
        """
        return functional.linear(self.hidden(ids, caches), self.model.embed_tokens.weight)

    def _initialise(self) -> None:
        """Small normal weights; what is added to the residual stream starts at zero."""
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(weight, std=0.02)
            else:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def with_kv_heads(model: Llama, num_kv_heads: int) -> Llama:
    """Return a model that computes the same with more key-value heads, each a copy of one."""
    if num_kv_heads == model.config.num_kv_heads:
        return model
    times, rest = divmod(num_kv_heads, model.config.num_kv_heads)
    if rest or not times:
        raise ValueError(f"{model.config.num_kv_heads} heads cannot become {num_kv_heads}")
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.unflatten(0, (-1, model.config.head_dim))
            weights[name] = heads.repeat_interleave(times, dim=0).flatten(0, 1)
    grown = Llama(replace(model.config, num_kv_heads=num_kv_heads))
    grown.load_state_dict(weights)
    return grown


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[max_position_embeddings, head_dim]`` in fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head of ``x [B, H, T, head_dim]`` by its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attend_in_halves(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend as ``attend`` where ``T == S``, but do not score the first half against the last."""
    half = query.shape[2] // 2
    if half == 0:
        return attend(query, key, value)
    first = attend(query[:, :, :half], key[:, :, :half], value[:, :, :half])
    return torch.cat([first, attend(query[:, :, half:], key, value)], dim=2)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """
    Causal attention as two batched products, which compile to faster CPU code than sdpa.

    Args:
        query: Scaled queries ``[B, H, T, d]`` of the last ``T`` of ``S`` tokens; ``H`` is a
            multiple of ``K``.
        key: Keys ``[B, K, S, d]``.
        value: Values ``[B, K, S, d]``.

    Returns:
        Mixed values ``[B, H, T, d]``; the softmax runs in fp32.
    """
    batch, heads, length, size = query.shape
    kv_heads, total = key.shape[1:3]
    groups = heads // kv_heads
    rows = query.reshape(batch * kv_heads, groups * length, size)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    scores = torch.bmm(rows, key.transpose(1, 2)).view(-1, groups, length, total)
    visible = torch.ones(length, total, dtype=torch.bool, device=scores.device)
    visible = visible.tril(total - length)
    weights = scores.float().masked_fill(~visible, -1e9).softmax(-1).to(value.dtype)
    mixed = torch.bmm(weights.view(-1, groups * length, total), value)
    return mixed.view(batch, heads, length, size)
