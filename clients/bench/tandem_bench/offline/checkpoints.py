"""Model directories of known sizes with random weights, written once and kept."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from tandem_bench.device.sizes import NORM_EPS, ROPE_THETA, ModelSizes

_VERSION = 1
"""Version of the weights; raise it with any change to the weights of the same sizes."""
_INITIAL_STD = 0.02
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def random_model(name: str, sizes: ModelSizes, cache: Path | None = None) -> Path:
    """
    Return the directory of a model of these sizes; write it if it does not exist.

    Matrices are normal with a standard deviation of 0.02, vectors are 1, all in bfloat16; weights
    are the same on every machine with the same PyTorch version.

    Args:
        name: Name of the sizes, which is part of the directory's name.
        sizes: Sizes of the model.
        cache: Directory of models; by default $TANDEM_CACHE_DIR, or else `tandem` in
            $XDG_CACHE_HOME or ~/.cache.

    Raises:
        OSError: The directory cannot be written.
    """
    folder = _cache_folder() if cache is None else cache
    target = folder / f"random-{name}-{_VERSION}"
    if _is_of(sizes, target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Written aside and moved, so that two first uses at once do not meet half a model.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".random-") as aside:
        made = Path(aside) / "model"
        made.mkdir()
        _write(sizes, made)
        try:
            made.replace(target)
        except OSError:  # the target exists
            if not _is_of(sizes, target):  # else another process wrote it, and may be reading it
                shutil.rmtree(target, ignore_errors=True)
                made.replace(target)
    return target


def stored_tensors(sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a model's file."""
    hidden, inner, head_dim = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    query, key = sizes.num_heads * head_dim, sizes.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if sizes.qk_norm:
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    biases = {"q": query, "k": key, "v": key} if sizes.qkv_bias else {}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not sizes.tied_embeddings:
        shapes["lm_head.weight"] = (sizes.vocab_size, hidden)
    for index in range(sizes.num_layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}.weight"] = shape
        for name, width in biases.items():
            shapes[f"model.layers.{index}.self_attn.{name}_proj.bias"] = (width,)
    return shapes


def _config(sizes: ModelSizes) -> str:
    """Return the text of config.json."""
    return json.dumps(
        {
            "architectures": [sizes.architecture],
            "model_type": _MODEL_TYPES[sizes.architecture],
            "vocab_size": sizes.vocab_size,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": sizes.max_positions,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "attention_bias": False,
            "mlp_bias": False,
            "initializer_range": _INITIAL_STD,
            "tie_word_embeddings": sizes.tied_embeddings,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }
    )


def _write(sizes: ModelSizes, directory: Path) -> None:
    import torch  # noqa: PLC0415  # not needed for flags and help
    from safetensors.torch import save_file  # noqa: PLC0415

    source = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else torch.randn(size, generator=source).mul_(_INITIAL_STD).to(torch.bfloat16)
        for name, size in stored_tensors(sizes).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(_config(sizes))


def _is_of(sizes: ModelSizes, directory: Path) -> bool:
    config = directory / "config.json"
    return config.is_file() and config.read_text() == _config(sizes)


def _cache_folder() -> Path:
    chosen = os.environ.get("TANDEM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
