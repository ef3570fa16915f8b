"""All layers in one call give what their operations give one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from executor_svc.device.choice import choose_kernels
from kernels import packed_linear, paged_attention, rms_norm, rope_kv_write, sampling, silu_mul
from kernels.layer_stack import LayerStack, LayerWeights, reference
from kernels.packed_linear import PackedWeight
from kernels.paged_attention import AttentionPlan, AttentionShape, PagedSequences

pytestmark = pytest.mark.compiler

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 40, 240, 4, 2, 24, 4
EPS, SCALE = 1e-5, DIM**-0.5
NO_CHUNKS: dict[str, int] = {}
CHUNKS = {"output": 4, "down": 2}
SHAPE = AttentionShape(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    block_size=BLOCK,
    dtype=torch.float32,
    device=CPU,
)
SEQUENCES = PagedSequences(
    query_len=np.array([1, 5, 1], np.int32),
    seq_len=np.array([7, 5, 12], np.int32),
    block_table=np.array([[3, 1, 0], [2, 6, 0], [5, 4, 7]], np.int32),
)
POSITION = torch.tensor([6, 0, 1, 2, 3, 4, 11])
KV_POSITION = torch.tensor([6, 8, 9, 10, 11, 24, 31])
"""Block times block size plus offset, of each row's own block table."""


@pytest.fixture(scope="module", autouse=True)
def in_cpp() -> Iterator[None]:
    choose_kernels(CPU, "on")
    yield
    paged_attention.use_cpu_extension("off")
    for operation in (packed_linear, rms_norm, rope_kv_write, sampling, silu_mul):
        operation.use_cpu_extension(wanted=False)


def layer(*, seed: int, with_options: bool, dtype: torch.dtype = torch.float32) -> LayerWeights:
    """
    Random weights, some of float32's in bfloat16, with biases and norms of heads where a family has
    them.
    """
    source = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=source) * 0.2).to(dtype)

    def optional(*shape: int) -> torch.Tensor | None:
        return numbers(*shape) if with_options else None

    qkv_size = (HEADS + 2 * KV_HEADS) * DIM
    return LayerWeights(
        input_norm=1 + numbers(HIDDEN),
        qkv=PackedWeight.of(numbers(qkv_size, HIDDEN)),
        qkv_bias=optional(qkv_size),
        qk_norm=optional(HEADS + KV_HEADS, DIM),
        output=PackedWeight.of(numbers(HIDDEN, HEADS * DIM).bfloat16().to(dtype)),
        output_bias=optional(HIDDEN),
        mlp_norm=1 + numbers(HIDDEN),
        gate_up=PackedWeight.of(numbers(2 * INNER, HIDDEN).bfloat16().to(dtype)),
        gate_up_bias=optional(2 * INNER),
        down=PackedWeight.of(numbers(HIDDEN, INNER)),
        down_bias=optional(HIDDEN),
    )


def step(
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Hidden states, caches of two layers, and the rest of a step's inputs."""
    source = torch.Generator().manual_seed(9)
    hidden = torch.randn((7, HIDDEN), generator=source)
    caches = [torch.randn((8, BLOCK, 2, KV_HEADS, DIM), generator=source) for _ in range(2)]
    angle = POSITION[:, None] * torch.rand((1, DIM // 2), generator=source)
    rotation = torch.stack([angle.cos(), angle.sin()], dim=-1)
    inputs = {"rotation": rotation, "kv_position": KV_POSITION}
    return hidden.to(dtype), [cache.to(dtype) for cache in caches], inputs


def plans(window: int | None = None, dtype: torch.dtype = torch.float32) -> list[AttentionPlan]:
    """Full attention, then attention with a window."""
    shape = replace(SHAPE, dtype=dtype)
    return [
        paged_attention.plan_paged_attention(SEQUENCES, shape, window=own) for own in (None, window)
    ]


def stack_of(layers: list[LayerWeights], chunks: Mapping[str, int] = NO_CHUNKS) -> LayerStack:
    return LayerStack(layers, norm_eps=EPS, scale=SCALE, chunks=chunks)


class TestRun:
    @pytest.mark.parametrize("with_options", [False, True], ids=["plain", "biases-and-head-norms"])
    @pytest.mark.parametrize("window", [None, 3], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("chunks", [NO_CHUNKS, CHUNKS], ids=["whole", "chunks"])
    def test_bits_are_those_of_the_operations(
        self,
        with_options: bool,
        window: int | None,
        dtype: torch.dtype,
        chunks: Mapping[str, int],
    ):
        """
        Decodes and a prompt together leave the same hidden states and caches as the operations one
        after another, call after call.
        """
        layers = [layer(seed=seed, with_options=with_options, dtype=dtype) for seed in (0, 1)]
        stack = stack_of(layers, chunks)
        assert stack.takes(plans(window, dtype))
        for _ in range(2):
            hidden, caches, inputs = step(dtype)
            expected, expected_caches, _ = step(dtype)
            stack.run(hidden, caches, plans(window, dtype), **inputs)
            reference.run(
                layers,
                expected,
                expected_caches,
                plans(window, dtype),
                norm_eps=EPS,
                scale=SCALE,
                chunks=chunks,
                **inputs,
            )
            assert torch.equal(expected, hidden)
            assert all(map(torch.equal, expected_caches, caches))

    def test_chunks_have_sums_of_their_own(self):
        """
        Sums in chunks have other bits than whole ones, and those of one matrix than those of both.
        """
        layers, found = [layer(seed=seed, with_options=True) for seed in (0, 1)], []
        for chunks in (NO_CHUNKS, {"down": 2}, CHUNKS):
            hidden, caches, inputs = step()
            stack_of(layers, chunks).run(hidden, caches, plans(), **inputs)
            found.append(hidden)
        whole, down, both = found
        assert not torch.equal(whole, down)
        assert not torch.equal(down, both)
        # Float32 sums in another order: 1e-6 per unit of numbers that reach about 10.
        assert torch.allclose(whole, both, atol=1e-4)

    @pytest.mark.parametrize(
        ("chunks", "text"), [({"down": 3}, "width 240, got 3"), ({"output": 32}, "must be even")]
    )
    def test_chunks_that_do_not_fit_are_refused(self, chunks: Mapping[str, int], text: str):
        """
        A number of chunks that makes no tree, or odd chunks, is a ValueError.
        """
        with pytest.raises(ValueError, match=text):
            stack_of([layer(seed=0, with_options=False)], chunks)

    def test_threads_do_not_matter(self):
        """
        Any number of threads, more than there are cores too, gives the same bits, call after call.
        """
        stack = stack_of([layer(seed=seed, with_options=True) for seed in (0, 1)])
        expected, expected_caches, inputs = step()
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            stack.run(expected, expected_caches, plans(), **inputs)
            for num_threads in (2, 5) * 5:
                torch.set_num_threads(num_threads)
                hidden, caches, _ = step()
                stack.run(hidden, caches, plans(), **inputs)
                assert torch.equal(expected, hidden)
                assert all(map(torch.equal, expected_caches, caches))
        finally:
            torch.set_num_threads(before)

    def test_position_past_the_caches_is_refused_before_anything_changes(self):
        """
        A token with a position past the caches is an IndexError, and hidden states and caches stay.
        """
        hidden, caches, inputs = step()
        before, caches_before, _ = step()
        inputs["kv_position"] = KV_POSITION + 8
        stack = stack_of([layer(seed=seed, with_options=False) for seed in (0, 1)])
        with pytest.raises(IndexError, match="position 32 is outside a cache of 32"):
            stack.run(hidden, caches, plans(), **inputs)
        assert torch.equal(before, hidden)
        assert all(map(torch.equal, caches_before, caches))

    def test_block_that_the_caches_lack_is_refused(self):
        """
        A block table that names a block past the caches' last is an IndexError.
        """
        hidden, caches, inputs = step()
        stack = stack_of([layer(seed=seed, with_options=False) for seed in (0, 1)])
        with pytest.raises(IndexError, match="block tables name blocks"):
            stack.run(hidden, [cache[:7].contiguous() for cache in caches], plans(), **inputs)

    def test_what_does_not_fit_is_said(self):
        """
        Other numbers of layers or tokens, other types, and other sizes than the layers' are ValueErrors.
        """
        hidden, caches, inputs = step()
        stack = stack_of([layer(seed=seed, with_options=False) for seed in (0, 1)])
        with pytest.raises(ValueError, match="2 layers need"):
            stack.run(hidden, caches[:1], plans(), **inputs)
        with pytest.raises(ValueError, match="of as many tokens"):
            stack.run(hidden[:6], caches, plans(), **inputs)
        with pytest.raises(ValueError, match="as the layers are"):
            stack.run(hidden.bfloat16(), caches, plans(), **inputs)
        turned = {**inputs, "rotation": inputs["rotation"].bfloat16()}
        with pytest.raises(ValueError, match="rotation must be contiguous float32"):
            stack.run(hidden, caches, plans(), **turned)
        with pytest.raises(ValueError, match=r"hidden must have shape \[7, 40\]"):
            stack.run(hidden[:, 1:].contiguous(), caches, plans(), **inputs)
        with pytest.raises(ValueError, match=r"and rotation \[7, 12, 2\]"):
            stack.run(
                hidden, caches, plans(), **{**inputs, "rotation": inputs["rotation"][:, 1:].clone()}
            )
        with pytest.raises(ValueError, match=r"caches must have shape \[blocks, 4, 2, 2, 24\]"):
            stack.run(
                hidden, [cache.view(16, 2, 2, KV_HEADS, DIM) for cache in caches], plans(), **inputs
            )
        others = replace(SHAPE, num_heads=2, num_kv_heads=1)
        planned = [paged_attention.plan_paged_attention(SEQUENCES, others)] * 2
        with pytest.raises(ValueError, match="cannot attend as planned"):
            stack.run(hidden, caches, planned, **inputs)


class TestTakes:
    def test_only_plans_in_cpp_are_taken(self):
        """
        Plans of another implementation are left to it, and so is everything without packed
        products.
        """
        stack = stack_of([layer(seed=0, with_options=False)])
        paged_attention.use_cpu_extension("off")
        others = plans()
        paged_attention.use_cpu_extension("on")
        assert not stack.takes(others)
        assert stack.takes(plans())
        packed_linear.use_cpu_extension(wanted=False)
        assert not stack.takes(plans())
        packed_linear.use_cpu_extension(wanted=True)

    def test_matrix_that_is_not_packed_is_refused(self):
        """
        A stack of a layer with a plain matrix cannot be made.
        """
        plain = replace(layer(seed=0, with_options=False), down=torch.zeros(HIDDEN, INNER))
        with pytest.raises(TypeError, match="is not packed"):
            stack_of([plain])

    @pytest.mark.parametrize(
        ("name", "changed"),
        [
            ("mlp_norm", torch.zeros(HIDDEN - 1)),
            ("mlp_norm", torch.zeros(HIDDEN, dtype=torch.float64)),
            ("down_bias", torch.zeros(2 * HIDDEN)[::2]),
            ("qk_norm", torch.zeros(HEADS, DIM)),
        ],
        ids=["shorter", "float64", "with-gaps", "heads-missing"],
    )
    def test_layer_unlike_the_first_is_refused(self, name: str, changed: torch.Tensor):
        """
        A weight that is not contiguous float32 of the shape it has in the first layer is refused by name and layer.
        """
        first, second = (layer(seed=seed, with_options=True) for seed in (0, 1))
        with pytest.raises(ValueError, match=f"{name} of layer 1 must be contiguous torch.float32"):
            stack_of([first, replace(second, **{name: changed})])
        with pytest.raises(ValueError, match="needs a layer"):
            stack_of([])

    def test_layers_of_another_type_are_refused(self):
        """
        Layers that are neither float32 nor bfloat16 cannot be a stack.
        """
        plain = layer(seed=0, with_options=False)
        with pytest.raises(ValueError, match=r"must be float32 or bfloat16, not torch\.float16"):
            stack_of([replace(plain, input_norm=plain.input_norm.half())])
