"""
Print a digest of a few products, sums and exponentials, as the libraries of this process compute them.

The inputs come from a generator of integers, so that they are the same under every setting.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention


def main() -> None:
    """Compute and print."""
    draws = np.random.Generator(np.random.PCG64(0))
    a, b = (draws.random(shape, dtype=np.float32) - 0.5 for shape in ((77, 301), (301, 93)))
    left, right = torch.from_numpy(a), torch.from_numpy(b)
    heads = left[None, None, :, :64]
    computed = [
        torch.from_numpy(a @ b),
        torch.from_numpy(a @ b[:, 0]),
        left @ right,
        left @ right[:, 0],
        (left.bfloat16() @ right.bfloat16()).float(),
        torch.exp(left),
        left.sum(dim=1),
        torch.randn(1000, generator=torch.Generator().manual_seed(0)),
        scaled_dot_product_attention(heads, heads, heads),
    ]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in computed)).hexdigest()
    sys.stdout.write(f"{digest[:16]}\n")


if __name__ == "__main__":
    main()
