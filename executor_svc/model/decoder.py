"""The forward pass of all supported model families, over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.model.loader import LoadedModel
from executor_svc.model.marked_parts import Mark, mark_parts, unmark_parts
from executor_svc.model.rope import rotation_table
from executor_svc.model.row_operations import FastOperations, InvariantOperations, RowOperations
from executor_svc.model.row_padding import padded_rows, pads_rows
from executor_svc.model.sharded_operations import ShardedOperations, ShardedVocabulary
from executor_svc.parallel.agreement import check_same_bits
from executor_svc.parallel.collectives import TensorCollectives
from executor_svc.parallel.pipeline import StageLink
from executor_svc.parallel.sharding import sum_chunks
from kernels.layer_stack import LayerStack, LayerWeights
from kernels.packed_linear import PackedWeight
from kernels.paged_attention import AttentionPlan, paged_attention
from kernels.rms_norm import rms_norm
from kernels.sampling import VocabularyShard

_PARTS = ("_attention", "_mlp", "project")

MLP_TOKENS = 1024
"""
Number of tokens that an MLP computes at a time: it bounds activations, and is enough to keep matrix
products busy.
"""
MOST_COMPARED = 64
"""Most tokens of a step whose hidden states ranks compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInputs:
    """
    Inputs of one step on the device: T tokens of all rows, one row after another.

    Attributes:
        token_id: int ``[T]``, each in the vocabulary; None on the stages after the first, which get
            hidden states instead.
        position: int64 ``[T]``, position in the token's own sequence.
        kv_position: int64 ``[T]``, cache position of its keys and values: block * block_size +
            offset.
        attention: Attention plan of the step by sliding window, one for each window of the model.
    """

    token_id: Tensor | None
    position: Tensor
    kv_position: Tensor
    attention: Mapping[int | None, AttentionPlan]


class Decoder:
    """
    A loaded model as a function of inputs and KV cache, without state but the table of rotations
    and, where ranks share the model, what they compare at times.

    Ranks that share a model call it together, with the same inputs and each with its own heads'
    cache, and get the same hidden states, and the logits of their own ids. Of several stages each
    computes its layers, from the hidden states that the stage before sends; the last one alone can
    project.

    If `pads_rows`, hidden states have rows of padding after the tokens' rows, so that matrix
    products see few sizes. Only row-wise operations see the padding: attention and the cache do
    not.
    """

    def __init__(
        self, model: LoadedModel, max_model_len: int, *, batch_invariant: bool = False
    ) -> None:
        """
        Args:
            model: Weights and description.
            max_model_len: Bound of positions, which are all below it.
            batch_invariant: Give each row the same bits alone and beside any other rows, and on 1,
                2 and 4 ranks, which is slower; attention must be planned with the same setting.
        """
        config = model.config
        self._operations: RowOperations = (
            InvariantOperations(model.groups.tensor_size) if batch_invariant else FastOperations()
        )
        self._vocabulary: ShardedVocabulary | None = None
        self._ranks = ranks = TensorCollectives(model.groups, ordered=batch_invariant)
        self._newest: Tensor | None = None
        """The last hidden states of the latest step, where other ranks have the same."""
        if model.groups.tensor is not None:
            self._operations = ShardedOperations(self._operations, ranks)
            self._vocabulary = ShardedVocabulary(model.sharding, ranks, model.groups)
        self._model = model
        self._link = None if model.groups.pipeline is None else StageLink(model.groups)
        self._config = config
        self._windows = model.rank_config.windows
        self._weights = model.weights
        self._scale = config.head_dim**-0.5
        self._has_chunks = batch_invariant
        self._stack = _stack_of(model, self._scale, has_chunks=batch_invariant)
        self._pads_rows = (
            not batch_invariant and not _is_packed(model) and pads_rows(model.dtype, model.device)
        )
        table = rotation_table(config.rope, config.head_dim, max_model_len)
        self._rotations = table.to(model.device)

    @property
    def vocab_size(self) -> int:
        """Number of ids, of which the ranks of the last stage have logits."""
        return self._config.vocab_size

    @property
    def num_logits(self) -> int:
        """Number of logits of a row, on this rank."""
        return self._config.vocab_size if self.shard is None else self.shard.width

    @property
    def shard(self) -> VocabularyShard | None:
        """The ids of this rank's logits; None for a model on one rank."""
        return None if self._vocabulary is None else self._vocabulary.shard

    @property
    def link(self) -> StageLink | None:
        """Transfers to the other stages; None for a model of one."""
        return self._link

    def forward(self, inputs: DecoderInputs, kv_layers: Sequence[Tensor]) -> Tensor:
        """
        Compute all layers of this stage and write the tokens' keys and values into the cache.

        Args:
            inputs: The step.
            kv_layers: KV cache per layer, ``[blocks, block_size, 2, num_kv_heads, head_dim]``.

        Returns:
            Hidden states before the final norm, ``[T, hidden_size]``; those of a stage before the
            last are on their way to the next one, and may not be changed.
        """
        hidden = self._layers(self._padded(self._entering(inputs)), inputs, kv_layers)
        hidden = hidden[: len(inputs.position)]
        if self._vocabulary is not None:
            self._newest = hidden[-MOST_COMPARED:].clone()  # a view would keep all of it
        if self._link is not None and not self._link.is_last:
            self._link.send_hidden(hidden)
        return hidden

    def no_hidden_states(self) -> Tensor:
        """Return the hidden states of a step without rows: ``[0, hidden_size]``."""
        return self._rotations.new_empty((0, self._config.hidden_size), dtype=self._model.dtype)

    def project(self, hidden: Tensor) -> Tensor:
        """
        Apply the final norm and the output projection to some rows: ``[R, hidden_size]`` to
        ``[R, num_logits]`` in the model's type.
        """
        normed = rms_norm(self._padded(hidden), self._weights.norm, self._config.norm_eps)
        logits = self._operations.linear(normed, self._weights.lm_head)[: hidden.shape[0]]
        return logits if self._vocabulary is None else self._vocabulary.logits(logits)

    def compare_ranks(self) -> None:
        """
        Compare the latest hidden states with those of the other ranks of this stage, which all do
        so after the same step; without other ranks it does nothing.

        Raises:
            InternalError: They differ.
        """
        if self._newest is not None:
            check_same_bits(self._newest, self._ranks)

    def mark_parts(self, mark: Mark) -> None:
        """Wrap "attention" and "mlp" of each layer, and "project", with `mark`."""
        self._stack = None  # layers computed in one call have no parts
        mark_parts(self, _PARTS, mark)

    def unmark_parts(self) -> None:
        """Undo `mark_parts`."""
        unmark_parts(self, _PARTS)
        self._stack = _stack_of(self._model, self._scale, has_chunks=self._has_chunks)

    def _entering(self, inputs: DecoderInputs) -> Tensor:
        """Return the tokens' embeddings, or their hidden states after the stage before."""
        if inputs.token_id is not None:
            return self._embedded(inputs.token_id)
        assert self._link is not None, "the first stage reads tokens"
        shape = len(inputs.position), self._config.hidden_size
        target = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        return self._link.receive_hidden(target)

    def _layers(self, hidden: Tensor, inputs: DecoderInputs, kv_layers: Sequence[Tensor]) -> Tensor:
        rotation = self._rotations.index_select(0, inputs.position)
        plans = [inputs.attention[window] for window in self._windows]
        stack = self._stack
        if stack is not None and hidden.shape[0] <= MLP_TOKENS and stack.takes(plans):
            kv_position = inputs.kv_position
            stack.run(hidden, kv_layers, plans, rotation=rotation, kv_position=kv_position)
            return hidden
        for layer, plan, kv_cache in zip(self._weights.layers, plans, kv_layers, strict=True):
            self._attention(
                layer,
                hidden,
                kv_cache,
                rotation=rotation,
                kv_position=inputs.kv_position,
                plan=plan,
            )
            for first in range(0, hidden.shape[0], MLP_TOKENS):
                self._mlp(layer, hidden[first : first + MLP_TOKENS])
        return hidden

    def _attention(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        kv_cache: Tensor,
        *,
        rotation: Tensor,
        kv_position: Tensor,
        plan: AttentionPlan,
    ) -> None:
        eps = self._config.norm_eps
        normed = rms_norm(hidden, layer.input_norm, eps)
        operations = self._operations
        qkv = operations.linear(normed, layer.qkv, layer.qkv_bias)[: kv_position.shape[0]]
        query = operations.rope_kv_write(
            qkv, rotation, kv_position, kv_cache, qk_norm=layer.qk_norm, norm_eps=eps
        )
        attended = self._padded(paged_attention(query, kv_cache, plan, self._scale).flatten(1))
        operations.add_linear(hidden, attended, layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> None:
        normed = rms_norm(hidden, layer.mlp_norm, self._config.norm_eps)
        operations = self._operations
        gate_up = operations.linear(normed, layer.gate_up, layer.gate_up_bias)
        operations.add_linear(hidden, operations.silu_mul(gate_up), layer.down, layer.down_bias)

    def _embedded(self, token_id: Tensor) -> Tensor:
        if self._vocabulary is not None:
            return self._vocabulary.embedded(token_id, self._rows)
        return self._rows(token_id)

    def _rows(self, token_id: Tensor) -> Tensor:
        table = self._weights.embedding
        if isinstance(table, PackedWeight):
            return table.rows(token_id, self._model.dtype)
        return functional.embedding(token_id, table)

    def _padded(self, rows: Tensor) -> Tensor:
        """Append rows of zeros up to the number of rows that matrix products should see."""
        num_added = padded_rows(rows.shape[0]) - rows.shape[0] if self._pads_rows else 0
        return functional.pad(rows, (0, 0, 0, num_added)) if num_added else rows


def _stack_of(model: LoadedModel, scale: float, *, has_chunks: bool) -> LayerStack | None:
    """
    Return all layers of the stage as one call, with sums in chunks or not; None if their matrices
    are not packed, or if ranks must add up their parts in the middle of each layer.
    """
    if model.groups.tensor is not None or not _is_packed(model):
        return None
    config, chunks = model.config, {}
    if has_chunks:
        chunks["output"] = sum_chunks(config.num_heads * config.head_dim)
        chunks["down"] = sum_chunks(config.intermediate_size)
    return LayerStack(model.weights.layers, norm_eps=config.norm_eps, scale=scale, chunks=chunks)


def _is_packed(model: LoadedModel) -> bool:
    return isinstance(model.weights.layers[0].qkv, PackedWeight)
