"""`python -m tests.gpu.rates.flashinfer_warm`: have FlashInfer compile what is compared with later, while tests run."""

from __future__ import annotations

import sys

import torch

from kernels.paged_attention import AttentionShape
from tandem_bench.device.operands import paged_buffers
from tandem_bench.device.shapes import SHAPES
from tandem_bench.kernels import flashinfer_peer
from tandem_bench.kernels.attention_cases import decode_rows, prompt_rows


def main() -> int:
    """Attend once in every way; nothing where it is not installed."""
    config = SHAPES["llama-8b"]
    shape = AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
    )
    for rows, is_decode in ((decode_rows(2, 64), True), (prompt_rows(2, 64), False)):
        for name, make in flashinfer_peer.contestants(shape, is_decode=is_decode):
            make(paged_buffers(shape, rows.query_len, rows.seq_len))()
            torch.cuda.synchronize()
            sys.stderr.write(f"{name} is ready\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
