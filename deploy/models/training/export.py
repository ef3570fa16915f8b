"""Write and read the model in Hugging Face layout: bf16 weights and three JSON files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .completions import Sampling
from .model import Llama, ModelConfig
from .tokenizer import BOS, BOS_ID, EOS, EOS_ID

# A conversation is a Python file: instructions in its docstring, requests as comments,
# answers as the code below them.
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{{- '\"\"\"' + message['content'] | trim + '\"\"\"\\n\\n' -}}"
    "{%- elif message['role'] == 'user' -%}"
    "{{- '# ' + (message['content'] | trim).replace('\\n', '\\n# ') + '\\n' -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- message['content'] | trim + '\\n\\n\\n' -}}"
    "{%- else -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
)

RECOMMENDED = Sampling(temperature=0.6, min_p=0.1, frequency_penalty=0.3)
"""
Default sampling params of requests, chosen on held-out heads other than the evaluated ones: of
those under which no completion of 3,000 looped, the ones under which most parsed.
"""


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def hf_tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }


def export(model: Llama, folder: Path) -> None:
    """Replace the weights and JSON files in ``folder``, each by one rename."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    temporary = folder / ".model.safetensors.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(folder / "model.safetensors")
    _write_json(folder / "config.json", hf_config(model.config))
    _write_json(folder / "tokenizer_config.json", hf_tokenizer_config(model.config))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "do_sample": True,
            "top_p": 1.0,
            **asdict(RECOMMENDED),
        },
    )


def load_exported(folder: Path) -> Llama:
    """Return the exported model with its bf16 weights widened to fp32."""
    stored = json.loads((folder / "config.json").read_text())
    config = ModelConfig(
        vocab_size=stored["vocab_size"],
        hidden_size=stored["hidden_size"],
        intermediate_size=stored["intermediate_size"],
        num_layers=stored["num_hidden_layers"],
        num_heads=stored["num_attention_heads"],
        num_kv_heads=stored["num_key_value_heads"],
        head_dim=stored["head_dim"],
        max_position_embeddings=stored["max_position_embeddings"],
        rms_norm_eps=stored["rms_norm_eps"],
        rope_theta=stored["rope_theta"],
    )
    model = Llama(config)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.eval()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def main() -> None:
    """Export the checkpoint of ``--work``, without the decay that a good model needs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of training files")
    parser.add_argument("--model", type=Path, required=True, help="folder of the bundled model")
    arguments = parser.parse_args()
    state = torch.load(arguments.work / "stable.pt", weights_only=True)
    model = Llama(ModelConfig(**state["config"]))
    model.load_state_dict(state["model"])
    export(model, arguments.model)


if __name__ == "__main__":
    main()
