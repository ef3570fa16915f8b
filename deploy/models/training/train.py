"""
Train the bundled model on a CPU or a GPU, for as long as one likes, in any number of sittings.

A run holds its learning rate and counts tokens, not time: it can be stopped at any moment and goes
on from its checkpoint at the very next window of text. ``--decay-tokens`` branches off a copy
whose learning rate falls to zero and exports it; the run itself stays as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu_features import cpu_has_any

from .batches import Batches
from .export import export, load_exported
from .loss import head_loss
from .model import Llama, ModelConfig, with_kv_heads
from .optimizer import Muon
from .schedule import Decay, is_long_step, rate_factor

TOKENS_PER_STEP = 8192
TOKENS_PER_PASS = 4096
SHORT_LEN = 512
LONG_LEN = 2048
MATRIX_RATE = 0.02
OTHER_RATE = 0.004
WEIGHT_DECAY = 0.05
MOMENTUM = 0.95
CHECKPOINT_EVERY_S = 300.0
LOG_EVERY_STEPS = 10
TRAINING_RECORD = "training.json"
CPU = torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class Progress:
    """
    Work that a run has done so far.

    Attributes:
        steps: Updates of the weights.
        tokens: Tokens trained on, by the runs before too that these weights come from.
        began: Tokens when the optimizers of this run began without any state.
        elapsed_s: Wall-clock time of all sittings together, without compilation.
        taken: Windows taken from the stream, by their length.
        stream: Digest of the token stream the run reads.
        decay: Set in a branch that ends.
    """

    steps: int = 0
    tokens: int = 0
    began: int = 0
    elapsed_s: float = 0.0
    taken: dict[int, int] = field(default_factory=dict)
    stream: str = ""
    decay: Decay | None = None


class Trainer:
    """Owns the weights, both optimizers and the progress of one run."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device = CPU) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.dtype = product_dtype(device)
        self.model = Llama(config).to(device)
        layers = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(parameter) for parameter in layers}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        self.muon = Muon(layers, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, dtype=self.dtype)
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
        ids, targets = ids.to(self.device), targets.to(self.device)
        for part, expected in zip(ids.chunk(passes), targets.chunk(passes), strict=True):
            loss = head_loss(self.hidden(part), weight, expected.flatten()) / passes
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            mean_loss += float(loss.detach())
        self.update(factor)
        self.progress.tokens += ids.numel()
        return mean_loss

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the last hidden states ``[B * T, D]`` of ids ``[B, T]``, for the loss."""
        is_narrow = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=is_narrow):
            hidden = self._hidden(ids)
        return hidden.flatten(0, 1).to(self.dtype)

    def update(self, factor: float) -> None:
        """Apply and drop the gradients at ``factor`` of the peak rates."""
        self.muon.step(MATRIX_RATE * factor)
        for group in self.adam.param_groups:
            group["lr"] = OTHER_RATE * factor
        self.adam.step()
        self.adam.zero_grad()
        self.progress.steps += 1

    def start_from(self, folder: Path) -> None:
        """
        Take exported weights, and go on in the text where their training stopped.

        Raises:
            ValueError: They have another shape; only key-value heads may be fewer, and are shared
                out to more.
        """
        exported = load_exported(folder)
        heads = self.model.config.num_kv_heads
        if replace(exported.config, num_kv_heads=heads) != self.model.config:
            raise ValueError(f"{folder} has another shape: {exported.config}")
        self.model.load_state_dict(with_kv_heads(exported, heads).state_dict())
        record = folder / TRAINING_RECORD
        if record.exists():
            stored = json.loads(record.read_text())
            taken = {int(length): count for length, count in stored["taken"].items()}
            self.progress = Progress(
                steps=stored["steps"],
                tokens=stored["tokens"],
                began=stored["tokens"],
                taken=taken,
                stream=stored["stream"],
            )

    def write_record(self, folder: Path) -> None:
        """Write beside exported weights what the next run that starts from them has to know."""
        progress = self.progress
        record = {
            "steps": progress.steps,
            "tokens": progress.tokens,
            "taken": {str(length): count for length, count in progress.taken.items()},
            "stream": progress.stream,
        }
        (folder / TRAINING_RECORD).write_text(json.dumps(record, indent=2) + "\n")

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
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        if state["config"] != asdict(self.model.config):
            raise ValueError(f"{path} holds another shape: {state['config']}")
        self.model.load_state_dict(state["model"])
        self.muon.buffers = state["muon"]
        self.adam.load_state_dict(state["adam"])
        self.progress = Progress(**state["progress"])
        decay = state["progress"]["decay"]
        self.progress.decay = Decay(**decay) if decay else None


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the narrowest type that matrix products are quick in: bf16 where it is in hardware."""
    if device.type == "cpu" and not cpu_has_any("avx512_bf16", "amx_bf16"):
        return torch.float32
    return torch.bfloat16


class Stop:
    """Turns SIGTERM and SIGINT into a wish to stop after the current step."""

    def __init__(self) -> None:
        self.is_wanted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._want())

    def _want(self) -> None:
        self.is_wanted = True


def run(trainer: Trainer, batches: Batches, until_tokens: int, checkpoint: Path) -> bool:
    """Train until ``until_tokens``, saving now and then; returns False when stopped before."""
    progress, stop = trainer.progress, Stop()
    saved_s, mean_loss = time.monotonic(), None
    while progress.tokens < until_tokens and not stop.is_wanted:
        start_s = time.monotonic()
        is_long = is_long_step(progress.steps, progress.tokens, progress.decay)
        length = LONG_LEN if is_long else SHORT_LEN
        factor = rate_factor(progress.tokens, progress.decay, began=progress.began)
        ids, targets = batches.take(length, TOKENS_PER_STEP // length)
        loss = trainer.step(ids, targets, factor)
        now_s = time.monotonic()
        progress.elapsed_s += now_s - start_s
        mean_loss = loss if mean_loss is None else 0.95 * mean_loss + 0.05 * loss
        if progress.steps % LOG_EVERY_STEPS == 0:
            print(
                f"step={progress.steps} tokens={progress.tokens} loss={mean_loss:.4f}"
                f" elapsed_s={progress.elapsed_s:.0f} rate={factor:.3f}"
                f" step_s={now_s - start_s:.1f}",
                flush=True,
            )
        if now_s - saved_s > CHECKPOINT_EVERY_S:
            trainer.save(checkpoint)
            saved_s = now_s
    trainer.save(checkpoint)
    print(f"saved steps={progress.steps} tokens={progress.tokens} at {checkpoint}", flush=True)
    return progress.tokens >= until_tokens


def prepare(trainer: Trainer, arguments: argparse.Namespace, stream: str) -> Path:
    """Load what the arguments ask to continue; returns the checkpoint to write."""
    main_run, branch = arguments.work / "stable.pt", arguments.work / "decay.pt"
    checkpoint: Path = branch if arguments.decay_tokens else main_run
    if checkpoint.exists():
        trainer.load(checkpoint)
    elif main_run.exists():  # with --decay-tokens
        trainer.load(main_run)
    elif arguments.from_model is not None:
        trainer.start_from(arguments.from_model)
    elif arguments.decay_tokens:
        raise SystemExit(f"train: {main_run} is missing; train without --decay-tokens first")
    progress = trainer.progress
    if arguments.decay_tokens and progress.decay is None:
        progress.decay = Decay(start=progress.tokens, tokens=arguments.decay_tokens)
    if progress.stream not in ("", stream):
        print("the training text differs from before: its first pass begins anew", flush=True)
        progress.taken = {}
    progress.stream = stream
    return checkpoint


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of training files")
    parser.add_argument("--until-tokens", type=int, default=200_000_000, help="end of the run")
    parser.add_argument(
        "--decay-tokens", type=int, help="branch off (or resume) a decay of so many tokens"
    )
    parser.add_argument("--export", type=Path, help="folder for the model a decay ends with")
    parser.add_argument(
        "--from-model", type=Path, help="start from exported weights when there is no checkpoint"
    )
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.decay_tokens is not None and arguments.decay_tokens <= 0:
        parser.error("--decay-tokens must be above 0")
    if (arguments.export is None) != (arguments.decay_tokens is None):
        parser.error("--decay-tokens and --export go together")
    return arguments


def main() -> None:
    """Train on ``--work/train.npy`` with checkpoints in ``--work``."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(ModelConfig(), arguments.seed, arguments.device)
    stream = np.load(arguments.work / "train.npy")
    checkpoint = prepare(trainer, arguments, hashlib.sha256(stream.tobytes()).hexdigest())
    progress = trainer.progress
    print(f"begin steps={progress.steps} tokens={progress.tokens} at {checkpoint}", flush=True)
    decay = progress.decay
    until = arguments.until_tokens if decay is None else decay.start + decay.tokens
    is_done = run(trainer, Batches(stream, arguments.seed, progress.taken), until, checkpoint)
    if is_done and decay is not None:
        export(trainer.model, arguments.export)
        trainer.write_record(arguments.export)
        checkpoint.unlink()


if __name__ == "__main__":
    main()
