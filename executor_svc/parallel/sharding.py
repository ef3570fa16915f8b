"""
The share of a model that each of its ranks holds, from sizes alone.

A model of several stages has its layers divided among them; the ranks of a stage divide each of
these layers. Query heads, the MLP's width and the vocabulary are cut into as many equal parts as
there are ranks in a stage. Projections into heads and into the MLP keep some of their rows
(column-parallel), those out of them the matching columns (row-parallel), so that each half of a
layer needs one sum over the ranks. Embedding and output projection, on the first and the last
stage, keep some rows of the vocabulary, the last rank with rows of padding if it does not divide.
Norms, and the biases that are added after a sum, are whole on every rank.

Source: Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from executor_svc.parallel.stages import Stage, stage_of
from tandem.errors import InvalidConfig


class Axis(Enum):
    """Sizes along which stored tensors are divided among ranks."""

    HEADS = "query heads"
    KV_HEADS = "key and value heads"
    INNER = "width of the MLP"
    VOCABULARY = "vocabulary"


_ROWS: Mapping[str, Axis] = MappingProxyType(
    {
        "q_proj": Axis.HEADS,
        "k_proj": Axis.KV_HEADS,
        "v_proj": Axis.KV_HEADS,
        "gate_proj": Axis.INNER,
        "up_proj": Axis.INNER,
        "embed_tokens": Axis.VOCABULARY,
        "lm_head": Axis.VOCABULARY,
    }
)
"""Modules whose weight and bias are divided by rows, by the last part of their name."""

_COLUMNS: Mapping[str, Axis] = MappingProxyType({"o_proj": Axis.HEADS, "down_proj": Axis.INNER})
"""Modules whose weight is divided by columns; their bias is whole."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Indices from `start` up to `stop` of one dimension of a stored tensor."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model that are divided among ranks, and the head size, which is not."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_layers: int

    def can_divide(self, size: int) -> bool:
        """Tell whether so many ranks can hold a stage's layers."""
        kv_heads = self.num_kv_heads
        return (
            self.num_heads % size == 0
            and self.intermediate_size % size == 0
            and (kv_heads % size == 0 or size % kv_heads == 0)
        )

    def legal_sizes(self) -> list[int]:
        """Return the numbers of ranks that can hold a stage's layers, in ascending order."""
        return [size for size in range(1, self.num_heads + 1) if self.can_divide(size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """
    The share of rank `rank` of the `size` ranks of a stage; made by `shard`, which checks the
    sizes.
    """

    whole: ModelSizes
    rank: int
    size: int
    stage: Stage

    @property
    def own(self) -> ModelSizes:
        """
        Sizes of this rank's tensors. Where there are fewer key heads than ranks, each rank has one,
        and several ranks hold the same; the vocabulary has rows of padding.
        """
        return replace(
            self.whole,
            num_heads=self.whole.num_heads // self.size,
            num_kv_heads=max(1, self.whole.num_kv_heads // self.size),
            intermediate_size=self.whole.intermediate_size // self.size,
            vocab_size=-(-self.whole.vocab_size // self.size),
            num_layers=len(self.stage.layers),
        )

    @property
    def has_bits_of_one_rank(self) -> bool:
        """True if each rank has whole chunks of every sum, as `sum_chunks` cuts them."""
        whole = self.whole
        widths = (whole.num_heads * whole.head_dim, whole.intermediate_size)
        return all(sum_chunks(width) % self.size == 0 for width in widths)

    @property
    def vocabulary(self) -> range:
        """Token ids whose rows this rank holds, without padding."""
        start, stop = self._bounds(Axis.VOCABULARY)
        return range(start, stop)

    def slice_of(self, name: str) -> TensorSlice | None:
        """Return the part of a stored tensor that this rank holds; None for all of it."""
        if self.size == 1:
            return None
        *_, module, kind = name.split(".")
        if module in _ROWS:
            return TensorSlice(0, *self._bounds(_ROWS[module]))
        if module in _COLUMNS and kind == "weight":
            return TensorSlice(1, *self._bounds(_COLUMNS[module]))
        return None

    def _bounds(self, axis: Axis) -> tuple[int, int]:
        own, rank = self.own, self.rank
        match axis:
            case Axis.HEADS:
                width = own.num_heads * own.head_dim
                return rank * width, (rank + 1) * width
            case Axis.KV_HEADS:
                # With more ranks than heads, neighbouring ranks share one.
                first = rank * self.whole.num_kv_heads // self.size
                return first * own.head_dim, (first + own.num_kv_heads) * own.head_dim
            case Axis.INNER:
                width = own.intermediate_size
                return rank * width, (rank + 1) * width
            case Axis.VOCABULARY:
                end = self.whole.vocab_size
                start = min(rank * own.vocab_size, end)
                return start, min(start + own.vocab_size, end)


def sum_chunks(width: int, size: int = 1) -> int:
    """
    Return the number of chunks of a rank's part of a sum whose bits must not depend on the number
    of ranks. The whole sum has the most of 4, 2 and 1 that are equal and of an even width; a rank
    has 1 where chunks are not whole on each.

    Args:
        width: Size of the rank's part of the dimension.
        size: Number of ranks.
    """
    whole = width * size
    chunks = max(each for each in (1, 2, 4) if each == 1 or whole % (2 * each) == 0)
    return chunks // size if chunks % size == 0 else 1


def shard(
    sizes: ModelSizes, rank: int, size: int, *, pipeline_rank: int = 0, pipeline_size: int = 1
) -> Sharding:
    """
    Return the share of one rank.

    Args:
        sizes: The model.
        rank: Place of the rank among those of its stage.
        size: Number of ranks of each stage.
        pipeline_rank: Its stage.
        pipeline_size: Number of stages.

    Raises:
        InvalidConfig: So many ranks cannot hold the model; names the numbers that can.
    """
    if not sizes.can_divide(size):
        *most, last = map(str, sizes.legal_sizes())
        legal = f"sizes are {', '.join(most)} and {last}" if most else f"size is {last}"
        raise InvalidConfig(
            f"tp_size {size} does not fit a model of {sizes.num_heads} heads, "
            f"{sizes.num_kv_heads} key heads and an MLP of width {sizes.intermediate_size}, which "
            f"are divided among the ranks: its legal {legal}"
        )
    stage = stage_of(sizes.num_layers, pipeline_rank, pipeline_size)
    return Sharding(whole=sizes, rank=rank, size=size, stage=stage)
