"""
Measure the exported model: bits per byte on held-out files, and fifty completions.

Writes ``evaluation.json`` beside the weights, the source of every number in the model card.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from .completions import (
    Prompt,
    Sampling,
    choose_prompts,
    complete,
    is_clean,
    is_cut_clean,
    loops,
)
from .corpus import SOURCES, SourceFile, read_named
from .export import RECOMMENDED, load_exported
from .memorization import count_shared, longest_shared_run
from .model import Llama
from .tokenizer import BOS_ID

WINDOW_LEN = 1024
STRIDE_LEN = 512
POSITION_STEP_LEN = 512
NEW_TOKENS = 128
FORBIDDEN_RUN = 40
TRANSCRIPTS = 10
TRANSCRIPTS_BEGIN = "<!-- transcripts: written by evaluate -->"
TRANSCRIPTS_END = "<!-- end of transcripts -->"
SAMPLINGS = (Sampling(), Sampling(temperature=0.4), RECOMMENDED)


@dataclass(slots=True)
class Tally:
    """Information content of some text: ``nats`` in total over ``text_bytes`` bytes."""

    nats: float = 0.0
    text_bytes: int = 0
    tokens: int = 0

    def add(self, other: Tally) -> None:
        """Add the counts of another text."""
        self.nats += other.nats
        self.text_bytes += other.text_bytes
        self.tokens += other.tokens

    @property
    def bits_per_byte(self) -> float:
        """Mean number of bits that the model needs per byte of text."""
        return self.nats / math.log(2) / self.text_bytes


def measure(model: Llama, tokenizer: Tokenizer, text: str) -> Tally:
    """
    Score every token of one file after the begin token.

    Each token sees at least ``WINDOW_LEN - STRIDE_LEN`` tokens before it, or all that exist.
    """
    ids = [BOS_ID, *tokenizer.encode(text).ids]
    nats, scored = 0.0, 1
    for start in range(0, max(len(ids) - WINDOW_LEN, 0) + STRIDE_LEN, STRIDE_LEN):
        window = torch.tensor(ids[start : start + WINDOW_LEN])
        if start + len(window) <= scored:
            break
        with torch.inference_mode():
            logits = model(window[None, :-1])[0]
        first = scored - start
        nats += float(
            functional.cross_entropy(logits[first - 1 :], window[first:], reduction="sum")
        )
        scored = start + len(window)
    return Tally(nats, len(text.encode()), len(ids) - 1)


def bits_per_byte(model: Llama, tokenizer: Tokenizer, files: list[SourceFile]) -> dict[str, Any]:
    """Return totals over all files and per source."""
    overall = Tally()
    by_source = {source.package: Tally() for source in SOURCES}
    for file in files:
        tally = measure(model, tokenizer, file.text)
        overall.add(tally)
        by_source[file.source].add(tally)
    return {
        "overall": round(overall.bits_per_byte, 4),
        "files": len(files),
        "text_bytes": overall.text_bytes,
        "tokens": overall.tokens,
        "by_source": {
            name: round(tally.bits_per_byte, 4)
            for name, tally in by_source.items()
            if tally.text_bytes
        },
    }


def bits_per_token_by_position(
    model: Llama, tokenizer: Tokenizer, files: list[SourceFile]
) -> dict[str, Any]:
    """Score the first tokens of every file that fills all positions, by their positions."""
    length = model.config.max_position_embeddings
    nats = torch.zeros(length - 1)
    used = 0
    for file in files:
        ids = torch.tensor([BOS_ID, *tokenizer.encode(file.text).ids][:length])
        if len(ids) < length:
            continue
        with torch.inference_mode():
            logits = model(ids[None, :-1])[0]
        nats += functional.cross_entropy(logits, ids[1:], reduction="none")
        used += 1
    bits = nats / math.log(2) / max(used, 1)
    result: dict[str, Any] = {"files": used}
    for start in range(0, length, POSITION_STEP_LEN):
        part = bits[start : start + POSITION_STEP_LEN]
        result[f"{start}-{start + POSITION_STEP_LEN}"] = round(float(part.mean()), 3)
    return result


def completion_scores(
    model: Llama,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    stream: npt.NDArray[np.uint16],
    sampling: Sampling,
) -> dict[str, Any]:
    """Complete every prompt with one sampling and judge the results."""
    made = [
        complete(
            model,
            tokenizer,
            prompt.text,
            limit=NEW_TOKENS,
            sampling=sampling,
            seed=position,
        )
        for position, prompt in enumerate(prompts)
    ]
    pairs = list(zip(prompts, made, strict=True))
    ids = [completion.ids for completion in made]
    return {
        **asdict(sampling),
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
        "clean": sum(is_clean(prompt.text, completion) for prompt, completion in pairs),
        "cut": sum(is_cut_clean(prompt.text, completion) for prompt, completion in pairs),
        "loop": sum(map(loops, ids)),
        f"repeat_{FORBIDDEN_RUN}_training_tokens": count_shared(stream, ids, FORBIDDEN_RUN),
        "longest_run_shared_with_training": longest_shared_run(stream, ids),
        "texts": [
            {
                "prompt": prompt.location,
                "clean": is_clean(prompt.text, completion),
                "cut": is_cut_clean(prompt.text, completion),
                "loops": loops(completion.ids),
                "completion": completion.text,
            }
            for prompt, completion in pairs
        ],
    }


def transcripts(prompts: list[Prompt], texts: list[dict[str, Any]]) -> str:
    """Return the first ``TRANSCRIPTS`` prompts with their completions as Markdown, in order."""
    parts = []
    for prompt, made in list(zip(prompts, texts, strict=True))[:TRANSCRIPTS]:
        verdict = "clean" if made["clean"] else "cut" if made["cut"] else "does not parse"
        verdict += ", loops" if made["loops"] else ""
        code = f"{prompt.text}# --- the model goes on ---\n{made['completion']}".rstrip()
        parts.append(f"`{prompt.location}`: {verdict}\n\n````text\n{code}\n````\n")
    return "\n".join(parts)


def with_transcripts(card: str, shown: str) -> str:
    """
    Replace the text between the two marks of a model card.

    Raises:
        ValueError: The card lacks a mark.
    """
    head, begin, rest = card.partition(TRANSCRIPTS_BEGIN)
    _, end, tail = rest.partition(TRANSCRIPTS_END)
    if not begin or not end:
        raise ValueError(f"the model card lacks {TRANSCRIPTS_BEGIN} or {TRANSCRIPTS_END}")
    return f"{head}{begin}\n\n{shown}\n{end}{tail}"


def main() -> None:
    """Evaluate ``--model``; compare its completions with ``--work/train.npy``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of training files")
    parser.add_argument("--model", type=Path, required=True, help="folder of the bundled model")
    parser.add_argument("--output", type=Path, help="default: evaluation.json beside the weights")
    arguments = parser.parse_args()
    folder = arguments.model
    model = load_exported(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    manifest = json.loads((folder / "manifest.json").read_text())
    files = read_named(manifest["held_out"])
    prompts = choose_prompts(files)
    stream = np.load(arguments.work / "train.npy", mmap_mode="r")
    report: dict[str, Any] = {
        "bits_per_byte": bits_per_byte(model, tokenizer, files),
        "bits_per_token_by_position": bits_per_token_by_position(model, tokenizer, files),
        "completions": [
            completion_scores(model, tokenizer, prompts, stream, sampling) for sampling in SAMPLINGS
        ],
    }
    output = arguments.output or folder / "evaluation.json"
    output.write_text(json.dumps(report, indent=1) + "\n")
    card = folder / "README.md"
    if arguments.output is None and card.exists():
        shown = transcripts(prompts, report["completions"][-1]["texts"])
        card.write_text(with_transcripts(card.read_text(), shown))
    print(json.dumps(report["bits_per_byte"], indent=1))
    print(json.dumps(report["bits_per_token_by_position"]))
    for scores in report["completions"]:
        print(json.dumps({key: scores[key] for key in scores if key != "texts"}))


if __name__ == "__main__":
    main()
