"""The shapes at which tunings are timed, by entry of a table, most important entries first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem_bench.device.sizes import MODEL_SIZES, ModelSizes
from tests.gpu.rates.sweep.tables import Key

WIDE_HEADS = "wide-heads"
"""A model with heads of 256, of which the known sizes have none."""

SIZES = {
    **MODEL_SIZES,
    WIDE_HEADS: ModelSizes(
        num_layers=1,
        hidden_size=3584,
        intermediate_size=14336,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        vocab_size=256000,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """
    A shape at which an operation is timed.

    Attributes:
        operation: Operation of the table.
        model: Name in `SIZES`.
        rows: Rows of the batch: sequences, or for products and sampling rows of the operand.
        queries: New positions of each sequence.
        length: Positions of each sequence, its new ones included; on average for decodes of
            many rows, which differ in length.
        part: Weight of a product, or kind of sampling.
        weight: Share in the choice of a tuning.
        is_ragged: Sequences differ in length and in new positions, of which `length` and `queries`
            are the most; decodes of several rows always differ in length.
    """

    operation: str
    model: str
    rows: int
    queries: int = 1
    length: int = 1
    part: str = ""
    weight: float = 1.0
    is_ragged: bool = False

    def __str__(self) -> str:
        lengths = f" q={self.queries} len={self.length}" if self.length > 1 else ""
        return f"{self.model}{f' {self.part}' if self.part else ''} B={self.rows}{lengths}"


def products(model: str) -> dict[str, tuple[int, int]]:
    """Return columns and width of each weight of a layer."""
    sizes = SIZES[model]
    heads = sizes.num_heads * sizes.head_dim
    return {
        "qkv": (heads + 2 * sizes.num_kv_heads * sizes.head_dim, sizes.hidden_size),
        "o": (sizes.hidden_size, heads),
        "gate_up": (2 * sizes.intermediate_size, sizes.hidden_size),
        "down": (sizes.hidden_size, sizes.intermediate_size),
    }


def _decodes(model: str, *shapes: tuple[int, int]) -> list[Point]:
    return [
        Point(operation="decode", model=model, rows=rows, length=length) for rows, length in shapes
    ]


def _prompts(kind: str, model: str, *shapes: tuple[int, int, int]) -> list[Point]:
    return [
        Point(operation=f"prefill_{kind}", model=model, rows=rows, queries=queries, length=length)
        for rows, queries, length in shapes
    ]


def _products(model: str, part: str, *rows: int) -> list[Point]:
    return [Point(operation="linear", model=model, part=part, rows=each) for each in rows]


def _draws(*rows: int) -> list[Point]:
    return [
        Point(operation="sampling", model=model, part=part, rows=each)
        for each in rows
        for model, part in (("llama-8b", "noise"), ("qwen3-0.6b", "top_p"))
    ]


_LONG = ((1, 4096, 4096), (4, 1024, 2048))
_SHORT = ((32, 16, 1040), (2, 12, 2060))
_INVARIANT = ((1, 1, 1024), (32, 1, 1024), (256, 1, 1024), (1, 2048, 2048))

POINTS: dict[Key, list[Point]] = {
    Key("decode", (128, 2)): [
        *_decodes("llama-8b", (1, 4096), (32, 1024), (256, 1024)),
        *_decodes("qwen3-0.6b", (1, 1024), (32, 1024), (256, 1024)),
    ],
    Key("decode", (64, 2)): _decodes("llama-1b", (1, 1024), (32, 1024), (32, 4096), (256, 1024)),
    Key("prefill_long", 128): [
        *_prompts("long", "llama-8b", *_LONG),
        *_prompts("long", "qwen3-0.6b", *_LONG[:1]),
    ],
    Key("prefill_long", 64): _prompts("long", "llama-1b", *_LONG),
    Key("sampling", None): _draws(256),
    Key("sampling", 64): _draws(32),
    Key("sampling", 16): _draws(1, 8),
    Key("prefill_short", 128): _prompts("short", "llama-8b", *_SHORT),
    Key("prefill_short", 64): _prompts("short", "llama-1b", *_SHORT),
    Key("linear", 2): [
        *_products("llama-8b", "qkv", 1, 32, 256),
        *_products("llama-8b", "down", 1, 256, 2048),
        *_products("llama-1b", "gate_up", 32, 256),
        *_products("qwen3-0.6b", "o", 1, 256),
    ],
    Key("prefill_invariant", 128): _prompts("invariant", "llama-8b", *_INVARIANT),
    Key("prefill_invariant", 64): _prompts("invariant", "llama-1b", *_INVARIANT),
    Key("decode", (256, 2)): _decodes(WIDE_HEADS, (1, 4096), (32, 1024), (256, 1024)),
    Key("prefill_long", 256): _prompts("long", WIDE_HEADS, *_LONG),
    Key("prefill_short", 256): _prompts("short", WIDE_HEADS, *_SHORT[:1]),
    Key("prefill_invariant", 256): _prompts("invariant", WIDE_HEADS, *_INVARIANT[1:]),
}
"""Points by entry, in the order of measurement."""

TINY: dict[Key, list[Point]] = {
    Key("decode", (64, 2)): _decodes("tiny", (1, 40)),
    **{
        Key(f"prefill_{kind}", 64): _prompts(kind, "tiny", (1, queries, 40))
        for kind, queries in (("long", 35), ("short", 5), ("invariant", 3))
    },
    Key("linear", 2): _products("tiny", "o", 3),
    Key("sampling", 16): [
        Point(operation="sampling", model="tiny", part=part, rows=2) for part in ("noise", "top_p")
    ],
}
"""Points that an interpreter computes in seconds."""


_FEW_ROWS = {"decode": 64, "linear": 256}
"""Rows up to which a second launch merges what programs share, in decodes and products."""
_CHECKED_ROWS = 5
"""Rows of a comparison, of different lengths: a single one cannot be mistaken for another."""
_CHECKED_LENGTH = {"decode": 700}
_CHECKED_QUERIES, _CHECKED_PROMPT, _CHECKED_PRODUCT_ROWS = 150, 300, 70
"""Sizes that need several tiles, and a part of one, in each direction."""


def kernel_sizes(point: Point) -> tuple[object, ...]:
    """Return what kernels are compiled for: points with the same differ in sizes of grids only."""
    few = point.rows <= _FEW_ROWS.get(point.operation, 0)
    return point.model, point.part, few


def check_points(points: Sequence[Point]) -> list[Point]:
    """
    Return a small point for each kind of kernel among an entry's points, at which results are
    compared: for each model, weight or kind of sampling, and for few and for many rows.
    """
    largest = {
        kernel_sizes(point): point
        for point in sorted(points, key=lambda point: (point.queries, point.rows))
    }
    return [_small(point) for point in largest.values()]


def _small(point: Point) -> Point:
    few = _FEW_ROWS.get(point.operation, 0)
    rows = _CHECKED_ROWS + (few if point.rows > few else 0)
    if point.operation == "linear" and point.rows <= few:
        rows = max(rows, min(point.rows, _CHECKED_PRODUCT_ROWS))
    return replace(
        point,
        rows=rows,
        queries=min(point.queries, _CHECKED_QUERIES),
        length=min(point.length, _CHECKED_LENGTH.get(point.operation, _CHECKED_PROMPT)),
        is_ragged=True,
    )
