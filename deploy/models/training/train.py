"""
Train the bundled model within a wall-clock budget on CPU.

The learning rate follows elapsed time, not steps, so a run ends annealed however busy the
machine is. A checkpoint can resume a killed run with the time it had left.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .export import export
from .loss import head_loss
from .model import Llama, ModelConfig
from .optimizer import Muon

TOKENS_PER_STEP = 8192
TOKENS_PER_PASS = 4096
SHORT_LEN = 512
LONG_LEN = 2048
LONG_PHASE_START = 0.80
LONG_PHASE_EVERY = 3
WARMUP_FRACTION = 0.02
DECAY_START = 0.35
MATRIX_RATE = 0.02
OTHER_RATE = 0.004
WEIGHT_DECAY = 0.05
MOMENTUM = 0.95
CHECKPOINT_EVERY_S = 300.0
LOG_EVERY_STEPS = 10


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a run has done so far; times in seconds."""

    steps: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def rate_factor(fraction: float) -> float:
    """Return the share of the peak learning rate at ``fraction`` of the budget, 0 to 1."""
    if fraction < WARMUP_FRACTION:
        return max(fraction / WARMUP_FRACTION, 0.01)
    if fraction < DECAY_START:
        return 1.0
    return max(0.0, (1.0 - fraction) / (1.0 - DECAY_START))


class Batches:
    """
    Endless windows of a token stream; one epoch visits every window once.

    Args:
        stream: Token ids ``[N]``.
        seed: Orders the windows.
    """

    def __init__(self, stream: npt.NDArray[np.uint16], seed: int) -> None:
        self._stream = stream
        self._random = np.random.default_rng(seed)
        self._queues: dict[int, Iterator[int]] = {}

    def take(self, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both ``[TOKENS_PER_STEP / length, length]`` int64."""
        starts = [self._next_start(length) for _ in range(TOKENS_PER_STEP // length)]
        rows = np.stack([self._stream[start : start + length + 1] for start in starts])
        ids = torch.from_numpy(rows.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def _next_start(self, length: int) -> int:
        start = next(self._queues.get(length, iter(())), None)
        if start is None:
            offset = int(self._random.integers(length))
            starts = np.arange(offset, len(self._stream) - length, length)
            self._random.shuffle(starts)
            self._queues[length] = iter(starts.tolist())
            start = next(self._queues[length])
        return start


class Trainer:
    """Owns the weights, both optimizers and the progress of one run."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Llama(config)
        layers = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(parameter) for parameter in layers}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        self.muon = Muon(layers, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        self.adam = torch.optim.AdamW(
            others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.progress = Progress()
        self._hidden: Callable[[Tensor], Tensor] = torch.compile(self.model.hidden, dynamic=False)

    def step(self, ids: Tensor, targets: Tensor, factor: float) -> float:
        """Update the weights once at ``factor`` of the peak rates; returns nats per token."""
        weight = self.model.model.embed_tokens.weight
        passes = TOKENS_PER_STEP // TOKENS_PER_PASS
        mean_loss = 0.0
        for part, expected in zip(ids.chunk(passes), targets.chunk(passes), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self._hidden(part)
            hidden = hidden.flatten(0, 1).bfloat16()
            loss = head_loss(hidden, weight, expected.flatten()) / passes
            loss.backward()  # type: ignore[no-untyped-call]
            mean_loss += float(loss.detach())
        self.muon.step(MATRIX_RATE * factor)
        for group in self.adam.param_groups:
            group["lr"] = OTHER_RATE * factor
        self.adam.step()
        self.adam.zero_grad()
        self.progress.steps += 1
        self.progress.tokens += ids.numel()
        return mean_loss

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        state = {
            "config": asdict(self.model.config),
            "model": self.model.state_dict(),
            "muon": self.muon.buffers,
            "adam": self.adam.state_dict(),
            "progress": asdict(self.progress),
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same shape."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.muon.buffers = state["muon"]
        self.adam.load_state_dict(state["adam"])
        self.progress = Progress(**state["progress"])


def run(trainer: Trainer, batches: Batches, budget_s: float, checkpoint: Path) -> None:
    """Train until ``budget_s`` of the run's own time has passed."""
    progress = trainer.progress
    start_s = time.monotonic() - progress.elapsed_s
    saved_s, mean_loss = progress.elapsed_s, None
    while progress.elapsed_s < budget_s:
        fraction = progress.elapsed_s / budget_s
        is_long = fraction > LONG_PHASE_START and progress.steps % LONG_PHASE_EVERY == 0
        ids, targets = batches.take(LONG_LEN if is_long else SHORT_LEN)
        loss = trainer.step(ids, targets, rate_factor(fraction))
        progress.elapsed_s = time.monotonic() - start_s
        mean_loss = loss if mean_loss is None else 0.95 * mean_loss + 0.05 * loss
        if progress.steps % LOG_EVERY_STEPS == 0:
            print(
                f"step={progress.steps} tokens={progress.tokens} loss={mean_loss:.4f}"
                f" elapsed_s={progress.elapsed_s:.0f} rate={rate_factor(fraction):.3f}",
                flush=True,
            )
        if progress.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
            trainer.save(checkpoint)
            saved_s = progress.elapsed_s
    trainer.save(checkpoint)


def main() -> None:
    """Train from ``--work/train.npy``, resuming ``--work/checkpoint.pt`` if it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of training files")
    parser.add_argument("--model", type=Path, required=True, help="folder of the bundled model")
    parser.add_argument("--budget-minutes", type=float, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = arguments.work / "checkpoint.pt"
    trainer = Trainer(ModelConfig(), arguments.seed)
    if checkpoint.exists():
        trainer.load(checkpoint)
    stream = np.load(arguments.work / "train.npy")
    batches = Batches(stream, arguments.seed + trainer.progress.steps)
    run(trainer, batches, arguments.budget_minutes * 60, checkpoint)
    export(trainer.model, arguments.model)


if __name__ == "__main__":
    main()
