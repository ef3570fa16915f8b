"""config.json and generation_config.json: what they mean and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from executor_svc.model.config import read_model_config
from executor_svc.model.rope import RopeKind
from tandem.errors import InvalidModel

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


def directory(path: Path, config: object, generation: object = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


class TestDefaults:
    def test_absent_keys_take_the_familys_meaning(self, tmp_path: Path):
        """
        A Llama that says no more than its sizes has full heads, plain rotations and no bias.
        """
        config = read_model_config(directory(tmp_path, LLAMA))
        assert (config.num_kv_heads, config.head_dim) == (8, 8)
        assert (config.rope.kind, config.rope.theta) == (RopeKind.DEFAULT, 10000.0)
        assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
        assert config.windows == (None,) * 4
        assert config.norm_eps == 1e-6
        assert config.eos_token_ids == (2,)
        assert {} == config.generation_defaults

    def test_mistral_has_a_window_unless_it_is_null(self, tmp_path: Path):
        """
        Mistral's window is 4,096 where config.json is silent and none where it says null.
        """
        assert read_model_config(directory(tmp_path, MISTRAL)).windows == (4096,) * 4
        without = {**MISTRAL, "sliding_window": None}
        assert read_model_config(directory(tmp_path, without)).windows == (None,) * 4

    def test_qwen_window_needs_its_switch(self, tmp_path: Path):
        """
        Qwen's sliding_window counts only with use_sliding_window, from max_window_layers or by layer_types.
        """
        off = {**QWEN2, "sliding_window": 32, "max_window_layers": 3}
        assert read_model_config(directory(tmp_path, off)).windows == (None,) * 4
        on = {**off, "use_sliding_window": True}
        assert read_model_config(directory(tmp_path, on)).windows == (None, None, None, 32)
        kinds = ["sliding_attention", "full_attention"] * 2
        typed = {**on, "layer_types": kinds}
        assert read_model_config(directory(tmp_path, typed)).windows == (32, None, 32, None)

    def test_ends_of_sequence_join_both_files(self, tmp_path: Path):
        """
        End ids come from generation_config.json first, then config.json, each once.
        """
        path = directory(
            tmp_path,
            {**LLAMA, "eos_token_id": [7, 5]},
            {"eos_token_id": 5, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05},
        )
        config = read_model_config(path)
        assert config.eos_token_ids == (5, 7)
        recommended = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
        assert config.generation_defaults == recommended

    @pytest.mark.parametrize(
        ("architecture", "changes", "generation", "expected"),
        [
            ("LlamaForCausalLM", {}, None, (2,)),
            ("MistralForCausalLM", {}, {"temperature": 0.5}, (2,)),
            ("MinistralForCausalLM", {}, {}, (2,)),
            ("Qwen2ForCausalLM", {}, None, ()),
            ("Qwen3ForCausalLM", {}, None, ()),
            ("LlamaForCausalLM", {"eos_token_id": None}, None, ()),
            ("LlamaForCausalLM", {"eos_token_id": []}, None, ()),
            ("LlamaForCausalLM", {}, {"eos_token_id": 9}, (9,)),
            ("LlamaForCausalLM", {}, {"eos_token_id": None}, ()),
            ("LlamaForCausalLM", {"eos_token_id": 8}, {"eos_token_id": [9, 8]}, (9, 8)),
            ("LlamaForCausalLM", {"vocab_size": 2}, None, ()),
        ],
    )
    def test_end_of_sequence_is_the_familys_where_no_file_has_the_key(
        self,
        tmp_path: Path,
        architecture: str,
        changes: Mapping[str, Any],
        generation: object,
        expected: tuple[int, ...],
    ):
        """
        Without eos_token_id in either file Llama and Mistral end at 2, as in transformers; null ends nowhere.
        """
        config = {**LLAMA, "architectures": [architecture], "num_key_value_heads": 2, **changes}
        found = read_model_config(directory(tmp_path, config, generation)).eos_token_ids
        assert expected == found

    @pytest.mark.parametrize("family", ["Llama", "Mistral", "Ministral", "Qwen2", "Qwen3"])
    def test_defaults_of_every_family_are_those_of_transformers(self, tmp_path: Path, family: str):
        """
        A config.json that says no more than its sizes means what it means to transformers.
        """
        import transformers  # noqa: PLC0415  # takes seconds to import

        right = getattr(transformers, f"{family}Config")()
        sizes = {"vocab_size": 1000, "hidden_size": 4096, "intermediate_size": 128}
        sizes |= {"num_hidden_layers": 30, "num_attention_heads": 32}
        found = read_model_config(
            directory(tmp_path, {"architectures": [f"{family}ForCausalLM"], **sizes})
        )
        end = right.eos_token_id
        assert (
            right.num_key_value_heads,
            right.max_position_embeddings,
            right.rms_norm_eps,
            right.tie_word_embeddings,
            right.rope_parameters["rope_theta"],
            () if end is None else (end,),
        ) == (
            found.num_kv_heads,
            found.max_position_embeddings,
            found.norm_eps,
            found.tied_embeddings,
            found.rope.theta,
            found.eos_token_ids,
        )


class TestRope:
    @pytest.mark.parametrize(
        "keys",
        [
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 5e5},
        ],
        ids=["old", "old-inner-theta", "new", "new-outer-theta"],
    )
    def test_old_and_new_spelling_mean_the_same(self, tmp_path: Path, keys: Mapping[str, Any]):
        """
        rope_scaling and rope_parameters are one thing, with theta inside or beside them.
        """
        rope = read_model_config(directory(tmp_path, {**LLAMA, **keys})).rope
        assert (rope.kind, rope.factor, rope.theta) == (RopeKind.LINEAR, 4.0, 5e5)

    def test_llama3_without_original_length_takes_the_models(self, tmp_path: Path):
        """
        The llama3 stretch is measured against max_position_embeddings where it names no length of its own.
        """
        scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
        rope = read_model_config(directory(tmp_path, {**LLAMA, "rope_scaling": scaling})).rope
        assert (rope.kind, rope.original_max_positions) == (RopeKind.LLAMA3, 2048)


class TestContextLen:
    @pytest.mark.parametrize(
        ("scaling", "expected"),
        [
            (None, 2048),
            ({"rope_type": "linear", "factor": 2.5}, 5120),
            (
                {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 512,
                },
                2048,
            ),
        ],
        ids=["none", "linear", "llama3"],
    )
    def test_linear_scaling_lengthens_what_the_model_supports(
        self, tmp_path: Path, scaling: Mapping[str, Any] | None, expected: int
    ):
        """
        max_position_embeddings are times the factor under linear scaling, and as they stand else.
        """
        config = read_model_config(directory(tmp_path, {**LLAMA, "rope_scaling": scaling}))
        assert expected == config.context_len


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            (
                {"architectures": ["GPT2LMHeadModel"]},
                "'GPT2LMHeadModel' is not supported; known: Llama",
            ),
            ({"architectures": None}, "architectures must list one name, got None; known: Llama"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
            (
                {"rope_scaling": {"type": "yarn", "factor": 2}},
                "rope type 'yarn' in rope_scaling is not",
            ),
            (
                {"rope_parameters": {"rope_type": "dynamic"}},
                "rope type 'dynamic' in rope_parameters",
            ),
            (
                {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}},
                "not supported: 'mscale'",
            ),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
            ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
            ({"hidden_size": None}, "lacks hidden_size"),
            ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
            ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
            ({"num_attention_heads": 8, "num_key_value_heads": 3}, "must be a multiple of"),
            ({"head_dim": 7}, "head_dim must be even"),
            ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number, got -1.0"),
            (
                {"tie_word_embeddings": "yes"},
                "tie_word_embeddings must be true or false, got 'yes'",
            ),
            ({"eos_token_id": 1000}, r"eos_token_id must be in \[0, 1000\)"),
            ({"quantization_config": {"bits": 4}}, "quantized checkpoints .* are not supported"),
            ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config. are not supported"),
            ({"model_type": "granite"}, "model_type 'granite' does not fit architecture 'LlamaFor"),
            ({"model_type": 5}, "model_type 5 does not fit .* which is of model_type llama"),
            ({"sliding_window": 8}, "sliding_window is 8, but in LlamaForCausalLM no layer has"),
            ({"layer_types": ["sliding_attention"] * 4}, "there is no window: in LlamaForCausalLM"),
            ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, got 1000000"),
            ({"hidden_size": 10**30}, "hidden_size must be at most 16777216, got 1000"),
            (
                {"max_position_embeddings": 1},
                "max_position_embeddings is 1, so that a sequence has",
            ),
            ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647, got 2147483648"),
            ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number, got 1000"),
            ({"num_attention_heads": -8}, "num_attention_heads must be a positive integer, got -8"),
            (
                {"eos_token_id": [1, -1]},
                r"eos_token_id must be in \[0, 1000\), the vocabulary, got -1",
            ),
        ],
    )
    def test_what_we_do_not_compute_is_named(
        self, tmp_path: Path, changes: Mapping[str, Any], sentence: str
    ):
        """
        An unknown or impossible setting is an error that names file, key and value; nothing is ignored.
        """
        with pytest.raises(InvalidModel, match=sentence) as caught:
            read_model_config(directory(tmp_path, {**LLAMA, **changes}))
        assert str(tmp_path / "config.json") in caught.value.message

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
            (
                {"layer_types": ["chunked_attention"] * 4},
                "'chunked_attention' is not supported here",
            ),
            ({"max_window_layers": -1}, "max_window_layers must be 0 or a positive integer"),
            (
                {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
                "layer but there is no window: in Qwen2ForCausalLM sliding_window and use_sliding",
            ),
            (
                {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
                "layer but there is no window: in Qwen2ForCausalLM sliding_window and use_sliding",
            ),
        ],
    )
    def test_bad_window_settings_are_named(
        self, tmp_path: Path, changes: Mapping[str, Any], sentence: str
    ):
        """
        Layer kinds we do not compute are refused where windows are in use.
        """
        on = {**QWEN2, "use_sliding_window": True, "sliding_window": 8, **changes}
        with pytest.raises(InvalidModel, match=sentence):
            read_model_config(directory(tmp_path, on))

    def test_missing_directory_and_file_say_what_to_give(self, tmp_path: Path):
        """
        A path that is nothing, a file, or a directory without config.json is answered with what belongs there.
        """
        with pytest.raises(InvalidModel, match="does not exist: give a directory in Hugging Face"):
            read_model_config(tmp_path / "nowhere")
        (tmp_path / "file").touch()
        with pytest.raises(InvalidModel, match="is not a directory"):
            read_model_config(tmp_path / "file")
        with pytest.raises(InvalidModel, match=r"has no config\.json"):
            read_model_config(tmp_path)

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b"{", "is not valid JSON"),
            (b"\xff\xfe", "is not valid JSON"),
            (b"[]", "must hold a JSON object"),
        ],
    )
    def test_broken_json_names_the_file(self, tmp_path: Path, content: bytes, sentence: str):
        """
        A config.json that cannot be read as an object is named.
        """
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(InvalidModel, match=sentence):
            read_model_config(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value", "rule"),
        [
            ("top_p", 0.0, r"must be in \(0, 1\], got 0.0"),
            ("top_p", -0.5, r"must be in \(0, 1\], got -0.5"),
            ("top_p", 1.5, r"must be in \(0, 1\], got 1.5"),
            ("top_p", 1e-60, r"must be in \(0, 1\], got 1e-60"),
            ("top_p", "0.9", "must be a finite number, got '0.9'"),
            ("top_p", True, "must be a finite number, got True"),
            ("temperature", -1, "must be non-negative, got -1"),
            ("temperature", 5, r"must be in \[0, 2\], got 5"),
            ("temperature", float("nan"), "must be a finite number, got nan"),
            ("temperature", 10**400, "must be a finite number, got 1000"),
            ("top_k", -2, r"must be 0 \(disable\), or at least 1, got -2"),
            ("top_k", 10**12, "must be at most 2147483647, got 1000000000000"),
            ("top_k", 2.5, "must be an integer, got 2.5"),
            ("min_p", 1.01, r"must be in \[0, 1\], got 1.01"),
            ("repetition_penalty", 0, "must be greater than zero, got 0"),
            ("repetition_penalty", 1e39, "must be a finite number, got 1e"),
            ("repetition_penalty", [1.0], r"must be a finite number, got \[1.0\]"),
            ("eos_token_id", 1000, r"must be in \[0, 1000\), the vocabulary, got 1000"),
        ],
    )
    def test_recommended_sampling_out_of_range_is_named(
        self, tmp_path: Path, key: str, value: object, rule: str
    ):
        """
        A recommended value out of a request's range is refused: file, key, range and value are
        named.
        """
        with pytest.raises(InvalidModel, match=f"{key} {rule}") as caught:
            read_model_config(directory(tmp_path, LLAMA, {key: value}))
        assert str(tmp_path / "generation_config.json") in caught.value.message

    def test_recommended_sampling_at_the_ends_of_its_ranges_is_taken(self, tmp_path: Path):
        """
        The least and the greatest value of each range may be recommended, and null is none.
        """
        low = {"temperature": 0, "top_k": -1, "top_p": 1e-30, "min_p": 0, "repetition_penalty": 0.1}
        high = {"temperature": 2.0, "top_k": 2**31 - 1, "top_p": 1, "min_p": 1.0}
        for given in (low, high, dict.fromkeys(low)):
            found = read_model_config(directory(tmp_path, LLAMA, given)).generation_defaults
            assert {name: value for name, value in given.items() if value is not None} == found

    def test_oversized_file_is_named(self, tmp_path: Path):
        """
        A config.json of hundreds of MB is refused before it is read.
        """
        with (tmp_path / "config.json").open("wb") as file:
            file.truncate(65 << 20)
        with pytest.raises(InvalidModel, match="has 68157440 bytes, more than the 67108864"):
            read_model_config(tmp_path)
