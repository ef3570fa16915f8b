"""Model directories with one file damaged: a model, or one typed sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from executor_svc.model.files.tokenizer_files import read_tokenizer_files
from executor_svc.model.loader import load_model
from tandem.errors import InvalidConfig, InvalidModel
from tests.broken_json import damaged, damaged_bytes

SHARDS = ("one.safetensors", "two.safetensors")
CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX = "model.safetensors.index.json"
OPTIONAL_KEYS = {
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "rope_theta": 10000.0,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "head_dim": 16,
}
"""Keys that a Llama's config.json may have besides those that transformers writes."""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model in two shards, with every file that a loader reads."""
    from tests.model_zoo import llama_tied_biased  # noqa: PLC0415  # needs transformers, seconds

    directory = llama_tied_biased(tmp_path_factory.mktemp("sharded"))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for shard, part in zip(SHARDS, (names[:9], names[9:]), strict=True):
        save_file({name: tensors[name] for name in part}, directory / shard)
        places |= dict.fromkeys(part, shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**config, **OPTIONAL_KEYS}))
    recommended = {"eos_token_id": [257, 1], "temperature": 0.5, "top_p": 0.9, "top_k": 5}
    recommended |= {"min_p": 0.1, "repetition_penalty": 1.1}
    (directory / GENERATION).write_text(json.dumps(recommended))
    return directory


def load_with(directory: Path, name: str, content: bytes) -> None:
    """
    Load everything that an executor loads, with one file's content replaced meanwhile, and check
    that a refusal is a sentence that names the directory and can be sent.
    """
    good = (directory / name).read_bytes()
    (directory / name).write_bytes(content)
    refusal = None
    try:
        read_tokenizer_files(directory)
        load_model(directory, dtype="float32", device="cpu")
    except (InvalidModel, InvalidConfig) as error:
        refusal = error.message
    finally:
        (directory / name).write_bytes(good)
    if refusal is not None:
        assert str(directory) in refusal
        assert len(refusal.encode()) < 2000
        assert "\n" not in refusal


class TestDamage:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", [CONFIG, GENERATION, INDEX, "tokenizer.json"])
    @settings(max_examples=80, deadline=None)
    @given(data=st.data())
    def test_any_wrong_value_loads_or_is_refused(
        self, sharded: Path, name: str, data: st.DataObject
    ):
        """
        A JSON file with one value of the wrong kind, size or sign, or missing, gives a model or a
        typed sentence, nothing else.
        """
        content = json.loads((sharded / name).read_text())
        load_with(sharded, name, data.draw(damaged(content)))

    @pytest.mark.slow
    @settings(max_examples=80, deadline=None)
    @given(data=st.data())
    def test_any_wrong_header_loads_or_is_refused(self, sharded: Path, data: st.DataObject):
        """
        A shard's header with one wrong value gives a model or a typed sentence, nothing else.
        """
        stored = (sharded / SHARDS[0]).read_bytes()
        end = 8 + int.from_bytes(stored[:8], "little")
        header = data.draw(damaged(json.loads(stored[8:end])))
        content = len(header).to_bytes(8, "little") + header + stored[end:]
        load_with(sharded, SHARDS[0], content)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [CONFIG, GENERATION, INDEX, SHARDS[1], "tokenizer.json"])
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
    @given(data=st.data())
    def test_any_wrong_byte_loads_or_is_refused(
        self, sharded: Path, name: str, data: st.DataObject
    ):
        """
        A file cut off anywhere, or with bytes overwritten, gives a model or a typed sentence,
        nothing else.
        """
        load_with(sharded, name, data.draw(damaged_bytes((sharded / name).read_bytes())))

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ("../one.safetensors", "'../one.safetensors'"),
            ("a" * 300, "'aaaa"),
            ("\ud800", r"'\\ud800'"),
            ("", "''"),
            ("..", "'..'"),
            (3, "3"),
            (None, "None"),
        ],
    )
    def test_shard_that_is_no_file_beside_the_index_is_named(
        self, sharded: Path, value: object, shown: str
    ):
        """
        An index may name files of its own folder only, each by a name that a system can have.
        """
        good = (sharded / INDEX).read_bytes()
        content = json.loads(good)
        content["weight_map"]["model.norm.weight"] = value
        (sharded / INDEX).write_text(json.dumps(content))
        try:
            with pytest.raises(InvalidModel, match=f"'model.norm.weight' .* {shown}") as caught:
                load_model(sharded, dtype="float32", device="cpu")
        finally:
            (sharded / INDEX).write_bytes(good)
        assert str(sharded) in caught.value.message
