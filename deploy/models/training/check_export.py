"""
Compare the exported model with Hugging Face ``transformers`` (to be installed for this).

Prints the largest difference of logits in fp32 and fails above ``TOLERANCE``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch

from .export import load_exported

# Both sides compute in fp32 from the same weights; only the order of sums differs.
TOLERANCE = 1e-3
LENGTH = 1024


def main() -> None:
    """Exit with status 1 when logits or the tokenizer disagree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the bundled model")
    folder = parser.parse_args().model
    transformers = importlib.import_module("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = Path(__file__).read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :LENGTH]
    restored = tokenizer.decode(tokenizer(text).input_ids) == text
    with torch.inference_mode():
        ours = load_exported(folder)(ids)
        theirs = reference(ids).logits
    difference = float((ours - theirs).abs().max())
    same_choice = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    print(f"largest_difference={difference:.2e} same_choice={same_choice:.4f} text={restored}")
    if difference > TOLERANCE or not restored:
        sys.exit(1)


if __name__ == "__main__":
    main()
