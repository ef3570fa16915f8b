"""
A decoder's weights on the device, read piece by piece from files: projections are fused and rotary
pairs made adjacent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.model.config import ModelConfig
from executor_svc.model.embeddings import EMBEDDING, OUTPUT
from executor_svc.model.files.checkpoint import Checkpoint, StoredTensor, read_pieces
from executor_svc.model.files.json_fields import shown
from executor_svc.model.shares import sharding_of
from executor_svc.parallel.sharding import ModelSizes, Sharding
from kernels.layer_stack import LayerWeights
from tandem.errors import InvalidModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """
    All weights, or those of one stage's layers; `lm_head` is the same tensor as `embedding` where
    they are tied. Where other stages have embedding, norm or `lm_head`, these have no rows.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


@dataclass(frozen=True, slots=True)
class _Target:
    """Destination of a stored tensor: rows of `rows`, in order or at `places`, on the CPU."""

    rows: Tensor
    places: Tensor | None = None


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, *, sharding: Sharding | None = None
) -> int:
    """Return the bytes that all weights take on the device, or those of one rank's share."""
    return stored_bytes(allocate_weights(config, dtype, torch.device("meta"), sharding=sharding))


def stored_bytes(weights: DecoderWeights) -> int:
    """Return the bytes of these weights; tied embeddings count once."""
    return sum(tensor.nbytes for tensor in distinct_tensors(weights))


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """
    Compare the tensors that the model needs with those that the files describe, without allocating
    memory for them.

    Raises:
        InvalidModel: A tensor is missing, unknown or of another shape.
    """
    nowhere = allocate_weights(config, torch.float32, torch.device("meta"))
    targets = _targets(config, checkpoint, nowhere, sharding_of(config))
    _check_names(config, checkpoint, targets)
    for name, target in targets.items():
        _check_shape(checkpoint.tensors[name], target)
    if config.tied_embeddings and OUTPUT in checkpoint.tensors:
        _check_shape(checkpoint.tensors[OUTPUT], _Target(nowhere.lm_head))


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sharding: Sharding | None = None,
) -> DecoderWeights:
    """
    Allocate the weights and fill them, converting to `dtype` on the way. Of a tensor that is
    divided among ranks only this rank's slice is read, and of layers only those of its stage.

    Args:
        config: The model.
        checkpoint: Files that passed `check_tensors`.
        dtype: Type to convert to.
        device: Device of the weights.
        sharding: Share to load; None for the whole model.

    Raises:
        InvalidModel: A file ends early.
    """
    share = sharding or sharding_of(config)
    weights = allocate_weights(config, dtype, device, sharding=share)
    targets = _targets(config, checkpoint, weights, share)
    for table in (weights.embedding, weights.lm_head):
        table[len(share.vocabulary) :].zero_()
    wanted = [checkpoint.tensors[name] for name in targets]
    for file in checkpoint.files:
        with file.open("rb", buffering=0) as handle:
            for stored in sorted(wanted, key=lambda each: each.offset):
                if stored.file == file:
                    target = targets[stored.name]
                    part = share.slice_of(stored.name)
                    for start, piece in read_pieces(stored, handle, part=part):
                        _place(piece, start, target)
    return weights


def _place(piece: Tensor, start: int, target: _Target) -> None:
    rows = len(piece)
    if target.places is None:
        target.rows[start : start + rows].copy_(piece)
        return
    moved = piece.to(target.rows.device, target.rows.dtype)
    if moved.dim() < target.rows.dim():  # the file has one vector for all heads
        moved = moved[:, None].expand(-1, target.rows.shape[1])
    places = target.places[start : start + rows].to(target.rows.device)
    target.rows.index_copy_(0, places, moved)


def allocate_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sharding: Sharding | None = None,
) -> DecoderWeights:
    """Allocate weights, or one rank's share of them, with undefined contents."""
    share = sharding or sharding_of(config)
    own, stage = share.own, share.stage
    hidden, inner = config.hidden_size, own.intermediate_size
    query_size = own.num_heads * own.head_dim
    qkv_size = query_size + 2 * own.num_kv_heads * own.head_dim

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def bias(present: bool, size: int) -> Tensor | None:
        return new(size) if present else None

    layers = tuple(
        LayerWeights(
            input_norm=new(hidden),
            qkv=new(qkv_size, hidden),
            qkv_bias=bias(config.qkv_bias, qkv_size),
            qk_norm=new(own.num_heads + own.num_kv_heads, own.head_dim) if config.qk_norm else None,
            output=new(hidden, query_size),
            output_bias=bias(config.output_bias, hidden),
            mlp_norm=new(hidden),
            gate_up=new(2 * inner, hidden),
            gate_up_bias=bias(config.mlp_bias, 2 * inner),
            down=new(hidden, inner),
            down_bias=bias(config.mlp_bias, hidden),
        )
        for _ in stage.layers
    )
    embedding = new(own.vocab_size if stage.is_first else 0, hidden)
    shares_table = config.tied_embeddings and stage.is_first and stage.is_last
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        norm=new(hidden if stage.is_last else 0),
        lm_head=embedding if shares_table else new(own.vocab_size if stage.is_last else 0, hidden),
    )


def distinct_tensors(weights: DecoderWeights) -> Iterator[Tensor]:
    """Yield every tensor once, even if two names share it."""
    yield weights.embedding
    yield weights.norm
    if weights.lm_head is not weights.embedding:
        yield weights.lm_head
    for layer in weights.layers:
        for name in LayerWeights.__slots__:
            tensor = getattr(layer, name)
            if tensor is not None:
                yield tensor


def _targets(
    config: ModelConfig, checkpoint: Checkpoint, weights: DecoderWeights, share: Sharding
) -> dict[str, _Target]:
    """
    Return the names of all tensors that a share of the model needs, and the destination of each in
    its weights.
    """
    stage, is_tied = share.stage, config.tied_embeddings
    # The file may name the tied tensor by either.
    embedding = OUTPUT if is_tied and EMBEDDING not in checkpoint.tensors else EMBEDDING
    targets = {}
    if stage.is_last:
        targets["model.norm.weight"] = _Target(weights.norm)
        targets[embedding if is_tied else OUTPUT] = _Target(weights.lm_head)
    if stage.is_first:
        targets[embedding] = _Target(weights.embedding)
    for index, layer in zip(stage.layers, weights.layers, strict=True):
        prefix = f"model.layers.{index}."
        for name, target in _layer_targets(share.own, layer):
            targets[prefix + name] = target
    return targets


def _layer_targets(own: ModelSizes, layer: LayerWeights) -> Iterator[tuple[str, _Target]]:
    yield "input_layernorm.weight", _Target(layer.input_norm)
    yield "post_attention_layernorm.weight", _Target(layer.mlp_norm)
    yield "self_attn.o_proj.weight", _Target(layer.output)
    yield "mlp.down_proj.weight", _Target(layer.down)
    if layer.output_bias is not None:
        yield "self_attn.o_proj.bias", _Target(layer.output_bias)
    if layer.down_bias is not None:
        yield "mlp.down_proj.bias", _Target(layer.down_bias)
    for kind, fused in (("weight", layer.gate_up), ("bias", layer.gate_up_bias)):
        if fused is not None:
            yield f"mlp.gate_proj.{kind}", _Target(fused[: own.intermediate_size])
            yield f"mlp.up_proj.{kind}", _Target(fused[own.intermediate_size :])
    head_dim, num_heads, num_kv_heads = own.head_dim, own.num_heads, own.num_kv_heads
    key_start, value_start = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
    for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if fused is not None:
            query_places = _pair_places(num_heads, head_dim)
            key_places = _pair_places(num_kv_heads, head_dim)
            yield f"self_attn.q_proj.{kind}", _Target(fused[:key_start], query_places)
            yield f"self_attn.k_proj.{kind}", _Target(fused[key_start:value_start], key_places)
            yield f"self_attn.v_proj.{kind}", _Target(fused[value_start:])
    if layer.qk_norm is not None:
        places = _pair_places(1, head_dim)
        yield "self_attn.q_norm.weight", _Target(layer.qk_norm[:num_heads].T, places)
        yield "self_attn.k_norm.weight", _Target(layer.qk_norm[num_heads:].T, places)


def _pair_places(num_heads: int, head_dim: int) -> Tensor:
    """
    Return the new row of each stored row, so that pairs `(i, i + head_dim / 2)` of every head
    become neighbours. It is on the CPU: arithmetic on the meta device, with which files are
    checked, makes PyTorch import its compiler, which takes seconds.
    """
    in_head = torch.arange(head_dim).view(2, -1)
    pair_first = torch.empty_like(in_head)
    pair_first[0] = in_head[0] * 2
    pair_first[1] = in_head[0] * 2 + 1
    heads = torch.arange(num_heads) * head_dim
    return (heads[:, None] + pair_first.view(1, -1)).view(-1)


def _check_names(config: ModelConfig, checkpoint: Checkpoint, targets: dict[str, _Target]) -> None:
    for name in targets:
        if name not in checkpoint.tensors:
            hint = ""
            if name == OUTPUT:
                hint = (
                    "; if the embeddings are tied, config.json must say tie_word_embeddings: true"
                )
            raise InvalidModel(f"tensor {name!r} is missing from {_places(checkpoint)}{hint}")
    for name, stored in checkpoint.tensors.items():
        redundant = name.endswith(".rotary_emb.inv_freq") or (
            config.tied_embeddings and name == OUTPUT
        )
        if name not in targets and not redundant:
            raise InvalidModel(
                f"{stored.file} holds tensor {shown(name)} that {config.architecture} does not "
                "have: config.json describes another model"
            )


def _places(checkpoint: Checkpoint) -> str:
    first = checkpoint.files[0]
    return str(first) if len(checkpoint.files) == 1 else f"the shards in {first.parent}"


def _check_shape(stored: StoredTensor, target: _Target) -> None:
    expected = tuple(target.rows.shape)
    if stored.name.endswith(("q_norm.weight", "k_norm.weight")):
        expected = expected[:1]
    if stored.shape != expected:
        raise InvalidModel(
            f"{stored.file}: tensor {stored.name!r} has shape {shown(list(stored.shape))}, "
            f"config.json implies {list(expected)}"
        )
