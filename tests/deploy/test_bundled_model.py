"""The bundled model: files, tokenizer, template, card, and the rules that judged it."""

import json
import re
import struct
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[2] / "deploy" / "models" / "tandem-py"
BUNDLE_LIMIT_BYTES = 25_000_000


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer_config() -> dict:
    return json.loads((FOLDER / "tokenizer_config.json").read_text())


def expected_shapes(config: dict) -> dict[str, list[int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": [hidden],
                "post_attention_layernorm": [hidden],
                "self_attn.q_proj": [queries, hidden],
                "self_attn.k_proj": [keys, hidden],
                "self_attn.v_proj": [keys, hidden],
                "self_attn.o_proj": [hidden, queries],
                "mlp.gate_proj": [inner, hidden],
                "mlp.up_proj": [inner, hidden],
                "mlp.down_proj": [hidden, inner],
            }.items()
        }
    return shapes


def render(tokenizer_config: dict, messages: list[dict[str, str]]) -> str:
    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment = jinja2.Environment(autoescape=False)  # as model loaders render templates
    template = environment.from_string(tokenizer_config["chat_template"])
    return template.render(
        messages=messages,
        add_generation_prompt=True,
        bos_token=tokenizer_config["bos_token"],
        eos_token=tokenizer_config["eos_token"],
        raise_exception=raise_exception,
    )


class TestFiles:
    def test_whole_folder_stays_below_limit(self):
        """
        Everything shipped with the model takes at most 25 MB.
        """
        files = [path for path in FOLDER.rglob("*") if path.is_file()]

        assert sum(path.stat().st_size for path in files) <= BUNDLE_LIMIT_BYTES

    def test_config_names_llama_with_explicit_sizes(self, config):
        """
        The config asks for the Llama architecture in bf16 with its head size spelled out.
        """
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["model_type"] == "llama"
        assert config["torch_dtype"] == "bfloat16"
        assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
        assert config["head_dim"] % 2 == 0
        assert config["tie_word_embeddings"]

    def test_weight_header_matches_config(self, config):
        """
        The weight file holds exactly the tensors the config implies, all in bf16.
        """
        raw = (FOLDER / "model.safetensors").read_bytes()
        (header_bytes,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + header_bytes])
        header.pop("__metadata__")

        assert expected_shapes(config) == {name: item["shape"] for name, item in header.items()}
        assert {"BF16"} == {item["dtype"] for item in header.values()}

    def test_weights_are_finite_and_trained(self, config):
        """
        No weight is infinite or NaN, and the layers that start at zero have moved.
        """
        with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
            for name in expected_shapes(config):
                assert torch.isfinite(weights.get_tensor(name)).all(), name
            assert weights.get_tensor("model.layers.0.mlp.down_proj.weight").any()


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            " leading space",
            "    return 1\n",
            "\n\n\n        x\n",
            "\t\tif x:\r\n",
            "trailing   ",
            "naïve café 日本語 🙂🏳️‍🌈",
            "\x00\x01\x7f\u00a0\u2028\ufeff",
            "e\u0301 is not \u00e9",
            "__init__ self._x0_1 1234567890",
            "".join(map(chr, range(1, 0x250))),
        ],
    )
    def test_any_text_comes_back_unchanged(self, tokenizer, text):
        """
        Decoding the ids of a text gives the same text, spaces and rare characters included.
        """
        assert text == tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)

    def test_every_byte_has_a_token(self, tokenizer):
        """
        All 256 byte symbols are in the vocabulary, so no text has an unknown part.
        """
        singles = [token for token in tokenizer.get_vocab() if len(token) == 1]

        assert len(singles) == 256

    def test_special_ids_match_config(self, tokenizer, tokenizer_config, config):
        """
        The begin and end tokens have the ids that the configs state, and nothing adds them.
        """
        generation = json.loads((FOLDER / "generation_config.json").read_text())

        assert config["bos_token_id"] == tokenizer.token_to_id(tokenizer_config["bos_token"])
        assert config["eos_token_id"] == tokenizer.token_to_id(tokenizer_config["eos_token"])
        assert config["eos_token_id"] == generation["eos_token_id"]
        assert config["vocab_size"] == tokenizer.get_vocab_size()
        assert not {0, 1} & set(tokenizer.encode("x = 1\n").ids)

    def test_recommended_sampling_is_what_was_evaluated(self):
        """
        Requests that choose nothing are sampled as the evaluated row with the fewest loops was.
        """
        generation = json.loads((FOLDER / "generation_config.json").read_text())
        rows = json.loads((FOLDER / "evaluation.json").read_text())["completions"]
        row = min(rows, key=lambda row: row["loop"])
        names = ("temperature", "min_p", "repetition_penalty", "frequency_penalty")

        assert {name: row[name] for name in names} == {name: generation[name] for name in names}

    def test_line_end_always_cuts_tokens(self, tokenizer):
        """
        A prompt ending at a line end has the ids it has as the start of a longer text.
        """
        head, tail = "def f(x):\n", "    return x\n"

        whole = tokenizer.encode(head + tail).ids

        assert whole == tokenizer.encode(head).ids + tokenizer.encode(tail).ids

    def test_indentation_is_one_token(self, tokenizer):
        """
        Each of the five first levels of indentation takes one token.
        """
        counts = [len(tokenizer.encode(" " * 4 * level).ids) for level in range(1, 6)]

        assert counts == [1] * 5


class TestChatTemplate:
    def test_conversation_reads_as_python(self, tokenizer_config):
        """
        Instructions become a docstring, requests comments, answers code.
        """
        text = render(
            tokenizer_config,
            [
                {"role": "system", "content": "Small helpers."},
                {"role": "user", "content": "Add two numbers.\nUse type hints."},
                {
                    "role": "assistant",
                    "content": "def add(a: int, b: int) -> int:\n    return a + b",
                },
                {"role": "user", "content": "Now subtract."},
            ],
        )

        code = text.removeprefix(tokenizer_config["bos_token"])
        assert code != text
        assert code.startswith('"""Small helpers."""\n\n# Add two numbers.\n# Use type hints.\n')
        assert code.endswith("return a + b\n\n\n# Now subtract.\n")
        compile(code, "chat", "exec")

    def test_unknown_role_is_refused(self, tokenizer_config):
        """
        A role the template does not know raises instead of vanishing.
        """
        with pytest.raises(ValueError, match="unknown role: tool"):
            render(tokenizer_config, [{"role": "tool", "content": "x"}])


class TestManifest:
    def test_held_out_files_are_listed_with_digests(self):
        """
        Every held-out file has a relative name in a known source and a sha256.
        """
        manifest = json.loads((FOLDER / "manifest.json").read_text())

        assert manifest["held_out"]
        for name, digest in manifest["held_out"].items():
            assert name.split("/")[0] in manifest["sources"]
            assert name.endswith(".py")
            assert re.fullmatch(r"[0-9a-f]{64}", digest)

    def test_totals_agree_with_list(self):
        """
        The number of held-out files per source adds up to the list, and each has a licence.
        """
        manifest = json.loads((FOLDER / "manifest.json").read_text())
        sources = manifest["sources"].values()

        assert len(manifest["held_out"]) == sum(source["held_out_files"] for source in sources)
        assert all(source["licence"] and source["version"] for source in sources)


class TestCard:
    def test_card_states_measured_bits_per_byte(self):
        """
        The model card repeats the bits per byte that the evaluation wrote.
        """
        measured = json.loads((FOLDER / "evaluation.json").read_text())["bits_per_byte"]["overall"]
        card = (FOLDER / "README.md").read_text()

        assert f"{measured:.3f} bits per byte" in card

    def test_evaluated_model_meets_its_aims(self):
        """
        Of fifty completions as recommended, thirty parse and none loops; text costs few bits.
        """
        evaluation = json.loads((FOLDER / "evaluation.json").read_text())
        recommended = evaluation["completions"][-1]

        assert 50 == recommended["prompts"] == len(recommended["texts"])
        assert recommended["cut"] >= 30
        assert recommended["loop"] == 0
        assert evaluation["bits_per_byte"]["overall"] < 0.969

    def test_recorded_counts_are_those_of_the_recorded_texts(self):
        """
        The counts of each row are the sums of the verdicts on its completions.
        """
        rows = json.loads((FOLDER / "evaluation.json").read_text())["completions"]

        for row in rows:
            verdicts = [(text["clean"], text["cut"], text["loops"]) for text in row["texts"]]
            told = (row["clean"], row["cut"], row["loop"])
            assert told == tuple(map(sum, zip(*verdicts, strict=True)))

    def test_card_shows_the_first_ten_completions_in_order(self):
        """
        The transcripts are those of the first ten prompts as recommended, whatever their verdict.
        """
        row = json.loads((FOLDER / "evaluation.json").read_text())["completions"][-1]
        card = (FOLDER / "README.md").read_text()
        shown = re.findall(
            r"^`([^`]+:\d+)`: (clean|cut|does not parse)(, loops)?$", card, re.MULTILINE
        )

        assert [text["prompt"] for text in row["texts"][:10]] == [place for place, *_ in shown]
        for text in row["texts"][:10]:
            assert text["completion"].rstrip() in card

    def test_no_completion_repeats_training_text(self):
        """
        The recorded completions share no run of 40 tokens with the training text.
        """
        evaluation = json.loads((FOLDER / "evaluation.json").read_text())

        runs = [part["longest_run_shared_with_training"] for part in evaluation["completions"]]

        assert runs
        assert max(runs) < 40
