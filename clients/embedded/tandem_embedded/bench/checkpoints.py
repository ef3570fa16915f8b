"""Random-weight models of real shapes, written once and kept."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_VERSION = 1
"""Raised with whatever changes the files of the same shape."""
_INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama model; `is_tied`: the embedding is the output projection too."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    is_tied: bool
    max_positions: int = 2048

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden_size // self.num_heads

    def config(self) -> dict[str, object]:
        """As config.json says it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "initializer_range": _INITIAL_STD,
            "tie_word_embeddings": self.is_tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every stored tensor."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            for name, shape in (
                ("input_layernorm", (hidden,)),
                ("self_attn.q_proj", (query, hidden)),
                ("self_attn.k_proj", (key, hidden)),
                ("self_attn.v_proj", (key, hidden)),
                ("self_attn.o_proj", (hidden, query)),
                ("post_attention_layernorm", (hidden,)),
                ("mlp.gate_proj", (inner, hidden)),
                ("mlp.up_proj", (inner, hidden)),
                ("mlp.down_proj", (hidden, inner)),
            ):
                shapes[f"model.layers.{index}.{name}.weight"] = shape
        return shapes


SHAPES = {
    "llama-135m": LlamaShape(
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        vocab_size=49152,
        is_tied=True,
    ),
    "llama-360m": LlamaShape(
        num_layers=32,
        hidden_size=960,
        intermediate_size=2560,
        num_heads=15,
        num_kv_heads=5,
        vocab_size=49152,
        is_tied=True,
    ),
    "llama-1b": LlamaShape(
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128256,
        is_tied=True,
    ),
}
"""By name: those of SmolLM2-135M, SmolLM2-360M and Llama-3.2-1B, all with tied embeddings."""


def random_model(name: str, shape: LlamaShape, cache: Path | None = None) -> Path:
    """
    Directory of a model of this shape, written now if it was not before.

    Matrices are normal with a deviation of 0.02, norms are 1, all in bfloat16; the same on every
    machine of one PyTorch version.

    Args:
        name: Of the shape, for the directory's name.
        shape: Its sizes.
        cache: Where models are kept; by default `tandem` in $XDG_CACHE_HOME or ~/.cache, or
            $TANDEM_CACHE_DIR itself.

    Raises:
        OSError: It cannot be written there.
    """
    folder = _cache_folder() if cache is None else cache
    target = folder / f"random-{name}-{_VERSION}"
    if (target / "config.json").is_file() and _is_of(shape, target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Written aside and moved, so that two first uses at once do not meet half a model.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".random-") as aside:
        made = Path(aside) / "model"
        made.mkdir()
        _write(shape, made)
        shutil.rmtree(target, ignore_errors=True)
        try:
            made.replace(target)
        except OSError:
            if not _is_of(shape, target):  # else another process was quicker with the same
                raise
    return target


def _write(shape: LlamaShape, directory: Path) -> None:
    import torch  # noqa: PLC0415 -- flags and help need it not
    from safetensors.torch import save_file  # noqa: PLC0415

    source = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else torch.randn(size, generator=source).mul_(_INITIAL_STD).to(torch.bfloat16)
        for name, size in shape.tensors().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(shape.config() | {"_shape": asdict(shape)}))


def _is_of(shape: LlamaShape, directory: Path) -> bool:
    config = directory / "config.json"
    return config.is_file() and json.loads(config.read_text()).get("_shape") == asdict(shape)


def _cache_folder() -> Path:
    chosen = os.environ.get("TANDEM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
