"""
Tiny random-weight models of every family we compute, written as Hugging Face directories.

Each function takes an empty or missing directory, writes config.json, model.safetensors, a
byte-level tokenizer and generation_config.json there, and returns it. Weights depend on the
family's name alone. All are 2 to 4 layers wide enough for distinct logits and take well under 0.3
s.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320
MAX_POSITIONS = 512
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257

_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}


def llama_mha(directory: Path) -> Path:
    """Llama 2 shape: as many key heads as query heads, untied embeddings."""
    return _write("llama_mha", "Llama", directory, num_key_value_heads=4)


def llama_gqa_llama3_rope(directory: Path) -> Path:
    """Llama 3.1 shape: grouped heads, the llama3 stretch inside `rope_parameters`."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return _write("llama_gqa_llama3_rope", "Llama", directory, rope_parameters=rope)


def llama_linear_rope(directory: Path) -> Path:
    """
    Llama with positions divided by 4, spelled the old way: `rope_scaling` beside `rope_theta`.
    """
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    _write("llama_linear_rope", "Llama", directory, rope_parameters=rope)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "linear", "factor": 4.0}
    config["rope_theta"] = 10000.0
    path.write_text(json.dumps(config))
    return directory


def llama_mqa(directory: Path) -> Path:
    """Llama with one key head for all query heads."""
    return _write("llama_mqa", "Llama", directory, num_key_value_heads=1)


def llama_head_dim(directory: Path) -> Path:
    """Llama with heads wider than hidden size / heads."""
    return _write("llama_head_dim", "Llama", directory, head_dim=24)


def llama_tied_biased(directory: Path) -> Path:
    """Llama with tied embeddings and a bias everywhere config.json can ask for one."""
    return _write(
        "llama_tied_biased",
        "Llama",
        directory,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )


def mistral_window(directory: Path) -> Path:
    """Mistral with a window of 24, shorter than the sequences that tests use."""
    return _write("mistral_window", "Mistral", directory, sliding_window=24)


def ministral_mixed(directory: Path) -> Path:
    """Ministral with a window of 24 in its second layer alone."""
    return _write(
        "ministral_mixed",
        "Ministral",
        directory,
        head_dim=16,
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention"],
    )


def qwen2(directory: Path) -> Path:
    """Qwen2: biases on queries, keys and values; a `sliding_window` that is not in use."""
    return _write("qwen2", "Qwen2", directory, sliding_window=24, use_sliding_window=False)


def qwen2_window(directory: Path) -> Path:
    """Qwen2 with full attention in its first two layers and a window of 24 in the last two."""
    return _write(
        "qwen2_window",
        "Qwen2",
        directory,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=2,
    )


def qwen3(directory: Path) -> Path:
    """Qwen3: queries and keys normalised per head, explicit head size, tied embeddings."""
    return _write("qwen3", "Qwen3", directory, head_dim=32, tie_word_embeddings=True)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    build.__name__: build
    for build in (
        llama_mha,
        llama_gqa_llama3_rope,
        llama_linear_rope,
        llama_mqa,
        llama_head_dim,
        llama_tied_biased,
        mistral_window,
        ministral_mixed,
        qwen2,
        qwen2_window,
        qwen3,
    )
}
"""Every builder by name."""


def write_tokenizer(directory: Path) -> None:
    """
    Write a tokenizer with one id per byte (0 to 255), <bos> 256 and <eos> 257, and a chat template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _write(name: str, family: str, directory: Path, **changes: Any) -> Path:
    import transformers  # noqa: PLC0415  # takes seconds, and most users of this module need it not

    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases start at 0 and norms at 1: mistakes would not show
                centre = 1.0 if "norm" in parameter_name else 0.0
                torch.nn.init.normal_(parameter.data, centre, 0.2)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory
