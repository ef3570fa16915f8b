"""Writer of a model as a GGUF file, the format that llama.cpp reads."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from torch import Tensor

from executor_svc.model.loader import LoadedModel, load_model
from executor_svc.model.rope import RopeKind
from tandem.errors import InvalidModel

_ARCHITECTURE = "llama"
_FILE_TYPES = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}


def write_gguf(model_dir: Path, dtype: str, path: Path) -> None:
    """
    Write the weights of a Hugging Face directory, matrices in `dtype` and norms in float32.

    There is no vocabulary: the file serves token ids only. The two numbers of a rotary pair are
    adjacent in queries and keys, as they are in our weights.

    Raises:
        InvalidModel: The model is not a plain Llama, or `dtype` is neither float32 nor bfloat16.
    """
    model = load_model(model_dir, dtype=dtype, device="cpu")
    _refuse_others(model_dir, model)
    config = model.config
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    writer.add_file_type(_FILE_TYPES[model.dtype])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for name, tensor in _tensors(model):
        _add(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _refuse_others(model_dir: Path, model: LoadedModel) -> None:
    config = model.config
    is_plain = config.architecture == "LlamaForCausalLM" and config.rope.kind is RopeKind.DEFAULT
    if not is_plain or config.qkv_bias or config.output_bias or config.mlp_bias:
        raise InvalidModel(
            f"{model_dir}: only LlamaForCausalLM without biases or rope scaling is written "
            "for llama.cpp; leave it out with --engine"
        )
    if model.dtype not in _FILE_TYPES:
        raise InvalidModel(
            f"{model_dir}: llama.cpp is compared in float32 or bfloat16, not {model.dtype_name}: "
            "choose --dtype, or leave it out with --engine"
        )


def _tensors(model: LoadedModel) -> list[tuple[str, Tensor]]:
    """Return every tensor with its name in a GGUF file."""
    config, weights = model.config, model.weights
    query_size = config.num_heads * config.head_dim
    key_size = config.num_kv_heads * config.head_dim
    named = [("token_embd.weight", weights.embedding), ("output_norm.weight", weights.norm)]
    if weights.lm_head is not weights.embedding:
        named.append(("output.weight", weights.lm_head))
    for index, layer in enumerate(weights.layers):
        query, key, value = torch.split(layer.qkv, [query_size, key_size, key_size])
        gate, up = layer.gate_up.chunk(2)
        named += [
            (f"blk.{index}.{name}.weight", tensor)
            for name, tensor in (
                ("attn_norm", layer.input_norm),
                ("attn_q", query),
                ("attn_k", key),
                ("attn_v", value),
                ("attn_output", layer.output),
                ("ffn_norm", layer.mlp_norm),
                ("ffn_gate", gate),
                ("ffn_up", up),
                ("ffn_down", layer.down),
            )
        ]
    return named


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    tensor = tensor.contiguous()
    if tensor.ndim == 1 or tensor.dtype == torch.float32:
        writer.add_tensor(name, tensor.float().numpy())
        return
    # numpy has no bfloat16: the bytes are passed with their type.
    data = tensor.view(torch.uint8).numpy()
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
