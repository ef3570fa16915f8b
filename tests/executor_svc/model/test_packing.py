"""A model with packed matrices is the same model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.model import packing
from executor_svc.model.decoder import Decoder
from executor_svc.model.loader import load_model
from kernels import packed_linear, paged_attention, rms_norm, rope_kv_write, silu_mul
from kernels.layer_stack import LayerStack
from kernels.packed_linear import PackedWeight
from tests.executor_svc.stepping import Bench, Row, batch, forward_logits, random_tokens

pytestmark = pytest.mark.compiler

ATOL = {"float32": 3e-5, "bfloat16": 0.1}
"""
Tolerance of logits, which are below 4. Ten sums of up to 112 terms lead to one through two layers:
float32 puts each off by about sqrt(112) * 6e-8 of its terms' sizes, all by 6e-6 of 4. In bfloat16
each of some 20 results on the way is rounded by up to 2 ** -9 of its size, by either side.
"""


@pytest.fixture(autouse=True)
def in_cpp():
    """Compute in C++."""
    assert packed_linear.use_cpu_extension(wanted=True)
    yield
    paged_attention.use_cpu_extension("off")
    for operation in (packed_linear, rms_norm, rope_kv_write, silu_mul):
        operation.use_cpu_extension(wanted=False)


def in_bfloat16(directory: Path, copy: Path) -> Path:
    """A copy of a checkpoint with its weights rounded to bfloat16."""
    shutil.copytree(directory, copy)
    file = copy / "model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(rounded, file, metadata={"format": "pt"})
    return copy


def logits_of(bench: Bench) -> torch.Tensor:
    """Return the logits of a prompt's tokens and of a decode after it."""
    admit = bench.admit(0, random_tokens(9, seed=3))
    prompt = forward_logits(bench.runner, batch(Row(0, 0, 9), admits=[admit]))
    return torch.cat([prompt, forward_logits(bench.runner, batch(Row(0, 9)))])


class TestPacking:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("family", ["llama_mha", "llama_tied_biased", "qwen3"])
    def test_packed_model_has_the_same_logits(self, zoo, family, dtype):
        """
        Untied, tied and biased models give the same logits with packed weights, to rounding.
        """
        plain = Bench.build(zoo(family), dtype=dtype, max_model_len=64)
        packed = Bench.build(zoo(family), dtype=dtype, max_model_len=64)
        packed.runner._decoder = Decoder(
            load_model(zoo(family), dtype=dtype, device="cpu", packs=True), 64
        )
        assert isinstance(packed.runner._decoder._weights.lm_head, PackedWeight)
        torch.testing.assert_close(logits_of(plain), logits_of(packed), rtol=0, atol=ATOL[dtype])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("family", ["llama_tied_biased", "qwen3"])
    def test_watched_layers_give_the_bits_of_one_call(self, zoo, family, dtype, monkeypatch):
        """
        While parts of layers are marked they run one by one, with the bits of all in one call.
        """
        paged_attention.use_cpu_extension("on")
        for operation in (rms_norm, rope_kv_write, silu_mul):
            operation.use_cpu_extension(wanted=True)
        found, names, runs = [], set(), []
        run = LayerStack.run
        monkeypatch.setattr(
            LayerStack,
            "run",
            lambda *given, **named: (runs.append(len(found)), run(*given, **named)),
        )
        for is_marked in (False, True):
            bench = Bench.build(zoo(family), dtype=dtype, max_model_len=64)
            decoder = Decoder(load_model(zoo(family), dtype=dtype, device="cpu", packs=True), 64)
            bench.runner._decoder = decoder
            if is_marked:
                decoder.mark_parts(lambda name, part: names.add(name) or part)
            found.append(logits_of(bench))
        assert torch.equal(*found)
        assert {"attention", "mlp", "project"} == names
        assert {0} == set(runs)

    def test_every_product_of_a_packed_model_is_of_a_packed_weight(self, zoo):
        """
        All matrices are packed; a tied embedding is the packed output projection, and counts once.
        """
        plain = load_model(zoo("llama_tied_biased"), dtype="float32", device="cpu")
        model = load_model(zoo("llama_tied_biased"), dtype="float32", device="cpu", packs=True)
        assert model.weights.embedding is model.weights.lm_head
        assert plain.fingerprint == model.fingerprint
        for layer in model.weights.layers:
            matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
            assert all(isinstance(matrix, PackedWeight) for matrix in matrices)
        # Panels of up to 48 columns are full, but for each matrix's last.
        assert plain.weight_bytes <= model.weight_bytes < 1.3 * plain.weight_bytes

    @pytest.mark.parametrize("family", ["llama_mha", "llama_tied_biased"])
    def test_checkpoint_in_bfloat16_takes_half_the_memory_and_gives_the_same_bits(
        self, zoo, family, tmp_path, monkeypatch
    ):
        """
        Numbers that came in bfloat16 stay so, and logits are those of weights kept in float32.
        """
        directory = in_bfloat16(zoo(family), tmp_path / family)
        found = []
        for dtype_of in (packing.packed_dtype, lambda _: torch.float32):
            monkeypatch.setattr(packing, "packed_dtype", dtype_of)
            model = load_model(directory, dtype="float32", device="cpu", packs=True)
            bench = Bench.build(directory, dtype="float32", max_model_len=64)
            bench.runner._decoder = Decoder(model, 64)
            found.append((logits_of(bench), model.weights))
        (narrow_logits, narrow), (wide_logits, wide) = found
        assert torch.equal(wide_logits, narrow_logits)
        assert 2 * narrow.lm_head.nbytes == wide.lm_head.nbytes
        for name in ("qkv", "output", "gate_up", "down"):
            sizes = [getattr(each.layers[1], name).nbytes for each in (narrow, wide)]
            assert 2 * sizes[0] == sizes[1]

    @pytest.mark.parametrize(
        ("dtype", "wanted"), [("float16", True), ("float32", False), ("bfloat16", False)]
    )
    def test_what_has_better_products_stays_as_it_is(self, zoo, dtype, wanted):
        """
        Float16, and all where C++ is off, keep their matrices.
        """
        packed_linear.use_cpu_extension(wanted=wanted)
        model = load_model(zoo("llama_mha"), dtype=dtype, device="cpu", packs=True)
        assert not isinstance(model.weights.lm_head, PackedWeight)
