"""Builds a runner's steps from static buffers and the graphs that capture them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from executor_svc.model.decoder import Decoder
from executor_svc.slots.sampling import SlotSampling
from executor_svc.slots.tokens import SlotTokens
from executor_svc.step.decode_graphs import DecodeGraphs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.mixed_graphs import MixedGraphs
from executor_svc.step.mixed_step import MixedStep
from executor_svc.step.static_decodes import StaticDecodes
from executor_svc.step.static_step import DecodeStep
from kernels.paged_attention import AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """
    Parts that all steps of a runner share.

    Attributes:
        decoder: The model.
        kv_layers: KV cache per layer, ``[blocks, block_size, 2, num_kv_heads, head_dim]``.
        tokens: Token histories of the slots.
        sampling: Sampling parameters of the slots.
        shape: Shape that attention is planned for.
        windows: Every sliding window of the model, None for full attention.
        num_slots: Number of sequences that can be held.
        max_blocks: Number of blocks of the longest sequence.
        margin_eps: Logit noise for margins; None if margins are not collected.
    """

    decoder: Decoder
    kv_layers: Sequence[Tensor]
    tokens: SlotTokens
    sampling: SlotSampling
    shape: AttentionShape
    windows: Collection[int | None]
    num_slots: int
    max_blocks: int
    margin_eps: float | None


def static_steps(
    parts: StepParts, max_rows: int, plan: GraphPlan | None
) -> tuple[StaticDecodes | None, DecodeGraphs | None, MixedGraphs | None]:
    """
    Build steps of decodes alone, of up to `max_rows` rows, their captured graphs, and captured
    steps with prompts; each is None if `max_rows` or the plan leaves it out.
    """
    if max_rows == 0:
        return None, None, None
    decodes, graphs = _decodes(parts, max_rows, plan)
    mixed = _mixed(parts, plan) if plan is not None and plan.mixed else None
    return decodes, graphs, mixed


def _decodes(
    parts: StepParts, max_rows: int, plan: GraphPlan | None
) -> tuple[StaticDecodes, DecodeGraphs | None]:
    step = DecodeStep(
        parts.decoder,
        parts.kv_layers,
        parts.tokens,
        parts.shape,
        parts.windows,
        num_slots=parts.num_slots,
        max_rows=min(max_rows, parts.num_slots),
        max_blocks=parts.max_blocks,
    )
    graphs = None if plan is None else DecodeGraphs(step, plan)
    decodes = StaticDecodes(
        step,
        parts.tokens,
        parts.sampling,
        margin_eps=parts.margin_eps,
        run=None if graphs is None else graphs.run,
    )
    return decodes, graphs


def _mixed(parts: StepParts, plan: GraphPlan) -> MixedGraphs:
    step = MixedStep(
        parts.decoder,
        parts.kv_layers,
        parts.tokens,
        parts.shape,
        parts.windows,
        max_tokens=max(shape.num_tokens for shape in plan.mixed),
        max_blocks=parts.max_blocks,
    )
    return MixedGraphs(step, plan, parts.sampling, margin_eps=parts.margin_eps)
