"""From a directory to weights: types, shards, fingerprints, and what is said when something is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from executor_svc.device import choice
from executor_svc.model import loader
from executor_svc.model.files import checkpoint
from executor_svc.model.loader import load_model
from kernels import cpu_features
from tandem.errors import InvalidConfig, InvalidModel, OutOfMemory
from tests.executor_svc.stepping import Bench, Row, batch, forward_logits, hugging_face_logits

Zoo = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]

NORM = "model.layers.1.input_layernorm.weight"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
TOLERANCE = 1e-4
"""Room for float32 sums in another order, 1e-6 per unit of logit; logits here reach about 10."""


@pytest.fixture
def model_dir(zoo: Zoo, tmp_path: Path) -> Path:
    """A copy of a good model, to be spoiled."""
    return Path(shutil.copytree(zoo("llama_mha"), tmp_path / "model"))


def rewrite(model_dir: Path, change: Callable[[Tensors], object]) -> None:
    """Load the weights, change the dict in place, save them."""
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, model_dir / "model.safetensors"
    )


def shard(model_dir: Path) -> tuple[Path, Path]:
    """Split the weights into two files with an index."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    names = sorted(tensors)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {}
    for file, part in zip(files, (names[:9], names[9:]), strict=True):
        save_file({name: tensors[name] for name in part}, model_dir / file)
        weight_map |= dict.fromkeys(part, file)
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model_dir / files[0], model_dir / files[1]


def keep_of_pair(tensors: Tensors, kept: str) -> None:
    """Leave embedding, output projection or both; "unlike": they differ, "last row unlike": there."""
    embedding = tensors.pop(EMBEDDING)
    if kept != "output":
        tensors[EMBEDDING] = embedding
    if kept != "embedding":
        tensors[OUTPUT] = embedding.clone()
    if kept == "unlike":
        tensors[OUTPUT] = embedding.flip(0)
    if kept == "last row unlike":
        tensors[OUTPUT][-1, -1] += 1.0


def load(model_dir: Path, dtype: str = "float32") -> loader.LoadedModel:
    return load_model(model_dir, dtype=dtype, device="cpu")


def some_logits(model_dir: Path, dtype: str = "float32") -> torch.Tensor:
    bench = Bench.build(model_dir, dtype=dtype)
    return forward_logits(
        bench.runner, batch(Row(0, 0, 5), admits=[bench.admit(0, [9, 8, 7, 6, 5])])
    )


class TestReading:
    def test_shards_give_the_same_model(self, model_dir: Path):
        """
        A sharded checkpoint loads to the same logits as the single file it was cut from.
        """
        whole = some_logits(model_dir)
        shard(model_dir)
        assert torch.equal(whole, some_logits(model_dir))

    def test_small_pieces_give_the_same_model(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """
        Weights read a few rows at a time are those read at once.
        """
        whole = some_logits(model_dir)
        monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 3 * 64 * 4)
        assert torch.equal(whole, some_logits(model_dir))

    def test_conversion_rounds_once(self, model_dir: Path):
        """
        Float32 weights loaded as bfloat16 compute what the same weights stored as bfloat16 compute.
        """
        converted = some_logits(model_dir, "bfloat16")
        rewrite(
            model_dir,
            lambda tensors: tensors.update(
                {name: each.bfloat16() for name, each in tensors.items()}
            ),
        )
        assert torch.equal(converted, some_logits(model_dir, "bfloat16"))

    def test_redundant_tensors_are_skipped(self, zoo: Zoo, tmp_path: Path):
        """
        Stored rotary frequencies, and a copy of tied embeddings, change nothing and take no memory.
        """
        model_dir = Path(shutil.copytree(zoo("llama_tied_biased"), tmp_path / "model"))
        whole, num_bytes = some_logits(model_dir), load(model_dir).weight_bytes
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
        rewrite(
            model_dir, lambda tensors: tensors.update(extra, **{OUTPUT: tensors[EMBEDDING] * 1})
        )
        assert torch.equal(whole, some_logits(model_dir))
        assert num_bytes == load(model_dir).weight_bytes

    def test_weight_bytes_count_shared_tensors_once(self, zoo: Zoo):
        """
        The announced bytes are those of the stored parameters in the chosen type.
        """
        for family in ("llama_tied_biased", "qwen2"):
            numbers = sum(
                each.numel() for each in load_file(zoo(family) / "model.safetensors").values()
            )
            assert 4 * numbers == load(zoo(family)).weight_bytes
            assert 2 * numbers == load(zoo(family), "float16").weight_bytes


class TestTiedEmbeddings:
    @pytest.mark.parametrize("family", ["llama_tied_biased", "qwen3"])
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("kept", ["embedding", "output", "equal", "unlike", "last row unlike"])
    def test_what_the_file_holds_counts_as_in_transformers(
        self, zoo: Zoo, tmp_path: Path, family: str, tied: bool, kept: str
    ):
        """
        Whichever of the two tensors is stored, equal or not, the logits are those of transformers, or it is refused where one is made up.
        """
        model_dir = Path(shutil.copytree(zoo(family), tmp_path / "model"))
        config = json.loads((model_dir / "config.json").read_text())
        (model_dir / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        rewrite(model_dir, lambda tensors: keep_of_pair(tensors, kept))
        if not tied and kept in {"embedding", "output"}:
            with pytest.raises(
                InvalidModel, match=r"tensor '(lm_head|model.embed_tokens).weight' is"
            ):
                load(model_dir)
            return
        tokens = [9, 8, 7, 6, 5, 319]
        bench = Bench.build(model_dir)
        found = forward_logits(bench.runner, batch(Row(0, 0, 6), admits=[bench.admit(0, tokens)]))
        assert (hugging_face_logits(model_dir, tokens) - found).abs().max() <= TOLERANCE

    def test_values_equal_in_the_computed_type_are_tied(self, zoo: Zoo, tmp_path: Path):
        """
        A pair that differs in float32 only below what bfloat16 tells apart is one tensor in bfloat16 and two in float32.
        """
        model_dir = Path(shutil.copytree(zoo("qwen3"), tmp_path / "model"))
        rewrite(model_dir, lambda tensors: tensors.update({OUTPUT: tensors[EMBEDDING].bfloat16()}))
        assert load(model_dir, "bfloat16").config.tied_embeddings
        assert not load(model_dir, "float32").config.tied_embeddings

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("shape", [(319, 64), (320, 63), (640, 64), (320 * 64,), ()])
    def test_output_projection_of_another_shape_is_named(
        self, zoo: Zoo, tmp_path: Path, tied: bool, shape: tuple[int, ...]
    ):
        """
        An lm_head of a wrong shape is refused with both shapes, also where it would not be used.
        """
        model_dir = Path(shutil.copytree(zoo("llama_tied_biased"), tmp_path / "model"))
        config = json.loads((model_dir / "config.json").read_text())
        (model_dir / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        rewrite(model_dir, lambda tensors: tensors.update({OUTPUT: torch.zeros(shape)}))
        expected = rf"'lm_head.weight' has shape \[{', '.join(map(str, shape))}\], .* \[320, 64\]"
        with pytest.raises(InvalidModel, match=expected):
            load(model_dir)


class TestFingerprint:
    def test_equal_files_give_equal_fingerprints(self, zoo: Zoo, model_dir: Path):
        """
        The fingerprint does not depend on where the directory lies.
        """
        fingerprint = load(model_dir).fingerprint
        assert load(zoo("llama_mha")).fingerprint == fingerprint
        assert len(fingerprint) == 64

    def test_type_weights_tokenizer_and_description_count(self, model_dir: Path):
        """
        Everything that can change a token changes the fingerprint.
        """
        found = {load(model_dir).fingerprint, load(model_dir, "bfloat16").fingerprint}
        rewrite(model_dir, lambda tensors: tensors[NORM].add_(1e-3))
        found.add(load(model_dir).fingerprint)
        with (model_dir / "tokenizer.json").open("a") as handle:
            handle.write(" ")
        found.add(load(model_dir).fingerprint)
        config = json.loads((model_dir / "config.json").read_text())
        (model_dir / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2e-5}))
        found.add(load(model_dir).fingerprint)
        assert len(found) == 5


class TestRefusals:
    def test_no_weights(self, model_dir: Path):
        """
        A directory without safetensors says what is missing and what is not read.
        """
        (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
        with pytest.raises(
            InvalidModel,
            match=r"neither model.safetensors nor model.safetensors.index.json \(pytorch_model.bin is",
        ):
            load(model_dir)

    def test_missing_tensor_is_named(self, model_dir: Path):
        """
        A tensor the architecture needs and the file lacks is named.
        """
        rewrite(model_dir, lambda tensors: tensors.pop(NORM))
        with pytest.raises(
            InvalidModel, match=f"tensor '{NORM}' is missing from .*model.safetensors"
        ):
            load(model_dir)

    def test_missing_output_projection_hints_at_tying(self, model_dir: Path):
        """
        Without lm_head.weight the error names the setting that would make it unnecessary.
        """
        rewrite(model_dir, lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(InvalidModel, match="tie_word_embeddings: true"):
            load(model_dir)

    def test_unknown_tensor_is_named(self, model_dir: Path):
        """
        A tensor the architecture does not have is refused: dropping a bias would change every token.
        """
        name = "model.layers.0.self_attn.q_proj.bias"
        rewrite(model_dir, lambda tensors: tensors.update({name: torch.zeros(64)}))
        with pytest.raises(
            InvalidModel, match=f"holds tensor '{name}' that LlamaForCausalLM does not"
        ):
            load(model_dir)

    def test_wrong_shape_is_named(self, model_dir: Path):
        """
        A tensor of another shape is named with both shapes.
        """
        rewrite(model_dir, lambda tensors: tensors.update({NORM: torch.zeros(63)}))
        with pytest.raises(
            InvalidModel, match=rf"'{NORM}' has shape \[63\], config.json implies \[64\]"
        ):
            load(model_dir)

    def test_unsupported_number_type_is_named(self, model_dir: Path):
        """
        A tensor of integers is refused with the types that are read.
        """
        rewrite(
            model_dir, lambda tensors: tensors.update({NORM: torch.zeros(64, dtype=torch.int8)})
        )
        with pytest.raises(
            InvalidModel, match=f"'{NORM}' has type 'I8', supported: F32, BF16, F16"
        ):
            load(model_dir)

    @pytest.mark.parametrize("keep", [0, 4, 200, -1])
    def test_truncated_file_is_named(self, model_dir: Path, keep: int):
        """
        A file cut anywhere, in its length, its header or its data, is called truncated.
        """
        file = model_dir / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(InvalidModel, match=r"model\.safetensors is truncated"):
            load(model_dir)

    @pytest.mark.parametrize(
        "header",
        [
            b"not json",
            b"[]",
            b'{"a": 1}',
            b"[" * 100_000,
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        ],
    )
    def test_corrupt_header_is_named(self, model_dir: Path, header: bytes):
        """
        A header that is not JSON, or describes nonsense, is called corrupt.
        """
        content = len(header).to_bytes(8, "little") + header + bytes(64)
        (model_dir / "model.safetensors").write_bytes(content)
        with pytest.raises(InvalidModel, match=r"model\.safetensors is corrupt"):
            load(model_dir)

    @settings(
        max_examples=80,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
    def test_any_damage_to_the_header_is_a_typed_error(
        self, model_dir: Path, damage: list[tuple[int, int]]
    ):
        """
        Loading works or ends in InvalidModel, whatever bytes of length or header are overwritten.
        """
        file = model_dir / "model.safetensors"
        good = file.read_bytes()
        content = bytearray(good)
        for place, value in damage:
            content[place] = value
        file.write_bytes(content)
        refused = None
        try:
            load(model_dir)
        except InvalidModel as error:
            refused = error
        finally:
            file.write_bytes(good)
        assert refused is None or "model.safetensors" in refused.message

    def test_missing_shard_is_named(self, model_dir: Path):
        """
        A shard the index names and the directory lacks is named.
        """
        _, second = shard(model_dir)
        second.unlink()
        with pytest.raises(InvalidModel, match=f"{second.name} is named by .* but is missing"):
            load(model_dir)

    def test_index_that_disagrees_with_its_shards_is_refused(self, model_dir: Path):
        """
        A shard must hold exactly what the index says.
        """
        first, second = shard(model_dir)
        shutil.copy(first, second)
        with pytest.raises(
            InvalidModel, match=f"{second.name} lacks tensor|{second.name} holds, but"
        ):
            load(model_dir)

    def test_index_cannot_point_outside_the_directory(self, model_dir: Path):
        """
        A file name with a path is not followed.
        """
        shard(model_dir)
        index = model_dir / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {NORM: "../model.safetensors"}}))
        with pytest.raises(InvalidModel, match=r"in a file beside it, not in '../model.safe"):
            load(model_dir)

    def test_too_little_memory_says_what_would_help(
        self, model_dir: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """
        Weights that do not fit are refused before anything is allocated, with the smaller type's need.
        """
        monkeypatch.setattr(loader, "available_bytes", lambda _device: 1000)
        with pytest.raises(OutOfMemory, match="are free on cpu: use --dtype bfloat16, which needs"):
            load(model_dir)
        with pytest.raises(OutOfMemory, match="use a smaller model or a device with more memory"):
            load(model_dir, "float16")

    @pytest.mark.parametrize(
        ("dtype", "device", "sentence"),
        [
            ("int8", "cpu", "dtype must be auto, float32, bfloat16, float16, got 'int8'"),
            ("auto", "tpu", "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
            ("auto", "cuda:x", "device must be auto"),
            ("auto", "cuda:99", "'cuda:99' was asked for but"),
        ],
    )
    def test_unknown_type_or_device_is_named(
        self, model_dir: Path, dtype: str, device: str, sentence: str
    ):
        """
        A wrong dtype or device is a configuration error that lists the right ones.
        """
        with pytest.raises(InvalidConfig, match=sentence):
            load_model(model_dir, dtype=dtype, device=device)


class TestAutomaticType:
    @pytest.fixture
    def cpu_with(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        """Make this CPU one with such flags, on which our kernels multiply or do not."""

        def change(flags: str, *, packs: bool) -> None:
            (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
            monkeypatch.setattr(cpu_features, "CPUINFO", tmp_path / "cpuinfo")
            monkeypatch.setattr(choice.packed_linear, "can_pack", lambda *_: packs)

        return change

    @pytest.mark.parametrize(
        ("stored", "packs", "flags", "chosen"),
        [
            ("bfloat16", True, "avx512_bf16", ("bfloat16", "avx512_bf16")),
            ("float16", True, "avx512_bf16", ("float32", "our kernels")),
            ("bfloat16", True, "avx2", ("float32", "our kernels")),
            ("bfloat16", True, "avx512_bf16 amx_bf16", ("bfloat16", "amx_bf16")),
            ("bfloat16", False, "avx512_bf16", ("bfloat16", "avx512_bf16")),
            ("float16", False, "avx512_bf16", ("bfloat16", "avx512_bf16")),
            ("bfloat16", False, "avx2", ("float32", "does not multiply")),
            ("float32", True, "amx_bf16", ("float32", "the checkpoint is")),
            (None, False, "amx_bf16", ("float32", "names no type")),
        ],
    )
    def test_cpu_takes_the_type_that_serves_soonest(
        self, cpu_with, stored: str | None, packs: bool, flags: str, chosen: tuple[str, str]
    ):
        """
        On a CPU "auto" is bfloat16 where the checkpoint and the processor's products are, also for
        float16 where only the framework multiplies or there are tiles, and float32 for all else;
        the reason says so.
        """
        cpu_with(flags, packs=packs)
        found, because = choice.choose_dtype("auto", stored, torch.device("cpu"))
        expected, why = chosen
        assert expected == choice.dtype_name(found)
        assert why in because
