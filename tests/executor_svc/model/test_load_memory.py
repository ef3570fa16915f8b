"""Memory that loading and running a model takes, measured in a process of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ALLOWANCE_BYTES = 300_000_000
"""
Memory beyond libraries, weights and KV cache: activations, and what libraries load when first used.
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

PROGRAM = """
import json, sys
from pathlib import Path
from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.loader import load_model
from executor_svc.step.runner import ModelRunner
from tests.executor_svc.stepping import Row, admission, batch

def peak():
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(status.split()[0]) * 1024

libraries = peak()  # half a gigabyte where PyTorch is built for CUDA, less where it is not
model = load_model(Path(sys.argv[1]), dtype=sys.argv[2], device="cpu")
kv = KvMemory(model.config, 512, 16, model.dtype, model.device)
for layer in kv.layers:
    layer.fill_(1.0)
runner = ModelRunner(model, kv, num_slots=4, max_model_len=2048, boot_id="b")
runner.warm_up()
admit = admission(0, [1] * 300, range(1, 33))
runner.execute(batch(Row(0, 0, 300), admits=[admit]), 1)
runner.execute(batch(Row(0, 300)), 2)
print(json.dumps({
    "peak": peak(),
    "libraries": libraries,
    "weights": model.weight_bytes,
    "kv": kv.device_bytes,
}))
"""


def write_zeros(directory: Path, type_name: str, item_bytes: int) -> None:
    """Write a checkpoint of zeros: its file is a hole, so it costs no disk and no time."""
    hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 256
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], hidden), "model.norm": (hidden,)}
    for index in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "input_layernorm": (hidden,),
            prefix + "post_attention_layernorm": (hidden,),
            prefix + "self_attn.q_proj": (hidden, hidden),
            prefix + "self_attn.k_proj": (kv, hidden),
            prefix + "self_attn.v_proj": (kv, hidden),
            prefix + "self_attn.o_proj": (hidden, hidden),
            prefix + "mlp.gate_proj": (inner, hidden),
            prefix + "mlp.up_proj": (inner, hidden),
            prefix + "mlp.down_proj": (hidden, inner),
        }
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * item_bytes
        entry = {"dtype": type_name, "shape": shape, "data_offsets": [begin, end]}
        header[name + ".weight"] = entry
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as handle:
        handle.write(len(encoded).to_bytes(8, "little") + encoded)
        handle.truncate(8 + len(encoded) + end)
    (directory / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak counter")
class TestPeak:
    @pytest.mark.parametrize(
        ("stored", "item_bytes", "dtype"),
        [("F32", 4, "float32"), ("BF16", 2, "float32"), ("F32", 4, "bfloat16")],
        ids=["as-stored", "widened", "narrowed"],
    )
    def test_peak_stays_under_weights_kv_and_allowance(
        self, tmp_path: Path, stored: str, item_bytes: int, dtype: str
    ):
        """
        Loading a 425 MB model, filling its KV and running a prompt never holds the weights twice.
        """
        write_zeros(tmp_path, stored, item_bytes)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), dtype],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[3],
        )
        assert done.returncode == 0, done.stderr
        measured = json.loads(done.stdout.splitlines()[-1])
        assert measured["weights"] > 200e6
        needed = measured["libraries"] + measured["weights"] + measured["kv"]
        assert measured["peak"] <= needed + ALLOWANCE_BYTES
