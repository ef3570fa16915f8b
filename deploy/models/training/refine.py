"""
Fine-tune exported weights on those of their own completions that pass the rules of the evaluation.

Each round samples completions of functions of the training files with the embedded engine, keeps
the good ones, and trains on them beside ordinary windows of the text, so that the model does not
forget it. What completes a repetition in a rejected completion is made less likely.

Source: expert iteration as in STaR (Zelikman et al., 2022) and RAFT (Dong et al., 2023);
unlikelihood of repeated n-grams (Welleck et al., 2019).
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tandem_embedded import EngineConfig, GenerationParams, InferenceEngine

from .batches import Batches
from .completions import (
    LOOP_GRAM,
    Completion,
    Prompt,
    Sampling,
    is_clean,
    is_cut_clean,
    loops,
    training_heads,
    validation_heads,
)
from .corpus import collect
from .evaluate import NEW_TOKENS
from .export import RECOMMENDED, export
from .loss import head_loss, unlikelihood_loss
from .model import ModelConfig
from .tokenizer import BOS_ID, EOS_ID
from .train import LOG_EVERY_STEPS, SHORT_LEN, Trainer

SAMPLINGS = (
    (
        Sampling(temperature=0.6, min_p=0.1, repetition_penalty=1.1, frequency_penalty=0.5),
        Sampling(temperature=0.8, min_p=0.1, repetition_penalty=1.1),
    ),
    (
        Sampling(temperature=0.6, min_p=0.15, repetition_penalty=1.0, frequency_penalty=0.4),
        Sampling(temperature=0.7, min_p=0.1, repetition_penalty=1.0, frequency_penalty=0.3),
    ),
    (
        Sampling(temperature=0.6, min_p=0.15, frequency_penalty=0.3),
        Sampling(temperature=0.7, min_p=0.1),
    ),
)
"""
Ways of sampling in each round, which take turns; rounds after these sample as the last. A model
that was refined once ends its text by itself more often, and wants smaller penalties. The last
round also samples without any, so that the repetitions that penalties hide are unlearned as well.
"""
MAX_REPEATS = 2
VALIDATION_SEED = 1000
TEXT_ROWS = 3
SAMPLE_ROWS = 5
PEAK = 0.08
WARMUP_STEPS = 10
REQUESTS_AT_ONCE = 256


class Mark(IntEnum):
    """Use of one token of a row in training."""

    CONTEXT = 0
    TEXT = 1
    LEARNED = 2
    UNLEARNED = 3


LOSSES = (
    (Mark.TEXT, head_loss, 0.5),
    (Mark.LEARNED, head_loss, 0.5),
    (Mark.UNLEARNED, unlikelihood_loss, 0.25),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion of one prompt; ``prompt_ids`` begin with the begin token."""

    prompt: Prompt
    prompt_ids: list[int]
    completion: Completion

    @property
    def is_good(self) -> bool:
        """True if it is clean and no ``LOOP_GRAM`` tokens in a row come too often."""
        is_varied = not repeated(self.completion.ids)
        return is_varied and is_clean(self.prompt.text, self.completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Token ids of a document, or of its first part, and the ``Mark`` of each."""

    ids: list[int]
    marks: list[Mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Examples one after the other in rows of equal length, both ``[R, SHORT_LEN + 1]`` int64."""

    ids: Tensor
    marks: Tensor


class Sampler:
    """The embedded engine with one set of weights, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(max_batch_size=64, max_model_len=1024, max_num_blocks=4096)
        self._engine = InferenceEngine(config, str(folder))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def sample(
        self, prompts: list[Prompt], samplings: Sequence[Sampling], seed: int
    ) -> list[Sample]:
        """Complete each prompt once, with the samplings in turn and its own seed."""
        made: list[Sample] = []
        for start in range(0, len(prompts), REQUESTS_AT_ONCE):
            made += self._batch(prompts[start : start + REQUESTS_AT_ONCE], samplings, seed + start)
        return made

    def _batch(
        self, prompts: list[Prompt], samplings: Sequence[Sampling], seed: int
    ) -> list[Sample]:
        submitted = {}
        for position, prompt in enumerate(prompts):
            ids = encoded(self.tokenizer, prompt)
            sampling = samplings[position % len(samplings)]
            params = GenerationParams(
                max_tokens=NEW_TOKENS,
                temperature=sampling.temperature,
                top_p=1.0,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                frequency_penalty=sampling.frequency_penalty,
                seed=seed + position,
            )
            submitted[self._engine.submit_request(ids, params)] = (prompt, ids)
        outputs = {done.request_id: list(done.output_tokens) for done in self._engine.run()}
        samples = []
        for request_id, (prompt, ids) in submitted.items():
            made = outputs[request_id]
            has_ended = made[-1:] == [EOS_ID]
            made = made[:-1] if has_ended else made
            text = self.tokenizer.decode(made)
            completion = Completion(ids=made, text=text, has_ended=has_ended)
            samples.append(Sample(prompt=prompt, prompt_ids=ids, completion=completion))
        return samples


def encoded(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the begin token and the ids of a prompt."""
    return [BOS_ID, *tokenizer.encode(prompt.text).ids]


def samplings_of(number: int) -> tuple[Sampling, ...]:
    """Return the ways of sampling in a round, which are counted from 0."""
    return SAMPLINGS[min(number, len(SAMPLINGS) - 1)]


def repeated(ids: list[int]) -> list[int]:
    """Return the places of tokens that end a gram seen at least ``MAX_REPEATS`` times before."""
    seen: Counter[tuple[int, ...]] = Counter()
    places = []
    for end in range(LOOP_GRAM, len(ids) + 1):
        gram = tuple(ids[end - LOOP_GRAM : end])
        if seen[gram] >= MAX_REPEATS:
            places.append(end - 1)
        seen[gram] += 1
    return places


def good_example(sample: Sample, newline_id: int) -> Example:
    """Return a document that is learned after its prompt: its whole lines, and its end if any."""
    made = sample.completion.ids
    if sample.completion.has_ended:
        made = [*made, EOS_ID]
    else:
        lines_end = len(made) - made[::-1].index(newline_id) if newline_id in made else 0
        made = made[:lines_end]
    marks = [Mark.CONTEXT] * len(sample.prompt_ids) + [Mark.LEARNED] * len(made)
    return Example(ids=sample.prompt_ids + made, marks=marks)


def looping_example(sample: Sample) -> Example:
    """Return a document of which only what repeats is marked, as what is to be unlearned."""
    marks = [Mark.CONTEXT] * (len(sample.prompt_ids) + len(sample.completion.ids))
    for place in repeated(sample.completion.ids):
        marks[len(sample.prompt_ids) + place] = Mark.UNLEARNED
    return Example(ids=sample.prompt_ids + sample.completion.ids, marks=marks)


def examples(samples: list[Sample], newline_id: int) -> list[Example]:
    """Return good samples, and half as many of those that repeat themselves."""
    good = [good_example(sample, newline_id) for sample in samples if sample.is_good]
    looping = [looping_example(made) for made in samples if repeated(made.completion.ids)]
    return good + looping[: max(len(good) // 2, 1)]


def pack(found: list[Example], length: int) -> Rows:
    """
    Put each example whole into the first row that has room for it; the rest of a row is padding.

    Raises:
        ValueError: An example is longer than a row.
    """
    rows: list[Example] = []
    for example in found:
        if len(example.ids) > length:
            raise ValueError(f"an example of {len(example.ids)} tokens does not fit in {length}")
        room = (row for row in rows if len(row.ids) + len(example.ids) <= length)
        row = next(room, None)
        if row is None:
            row = Example(ids=[], marks=[])
            rows.append(row)
        row.ids.extend(example.ids)
        row.marks.extend(example.marks)
    ids = torch.full((len(rows), length), EOS_ID)
    marks = torch.full((len(rows), length), int(Mark.CONTEXT))
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        marks[number, : len(row.marks)] = torch.tensor(row.marks)
    return Rows(ids=ids, marks=marks)


def batches_of(rows: Rows, count: int) -> Iterator[Rows]:
    """Yield ``count`` rows at a time; a rest is left out."""
    for start in range(0, len(rows.ids) - count + 1, count):
        yield Rows(ids=rows.ids[start : start + count], marks=rows.marks[start : start + count])


def step(trainer: Trainer, text: Rows, samples: Rows, factor: float) -> list[float]:
    """
    Update the weights once from rows of text and of samples.

    Returns:
        Nats per token of the text and of what is learned of samples, which weigh the same, and
        of what is unlearned.
    """
    weight = trainer.model.model.embed_tokens.weight
    ids, marks = torch.cat([text.ids, samples.ids]), torch.cat([text.marks, samples.marks])
    hidden = trainer.hidden(ids[:, :-1].contiguous())
    expected, marks = ids[:, 1:].flatten(), marks[:, 1:].flatten()
    total, losses = torch.zeros(()), []
    for mark, loss_of, share in LOSSES:
        chosen = marks == mark
        if chosen.any():
            loss = loss_of(hidden[chosen], weight, expected[chosen])
            total = total + share * loss
            losses.append(float(loss.detach()))
        else:
            losses.append(0.0)
    total.backward()  # type: ignore[no-untyped-call]  # torch's own
    trainer.update(factor)
    trainer.progress.tokens += expected.numel()
    return losses


def train_round(
    trainer: Trainer,
    batches: Batches,
    found: list[Example],
    random: np.random.Generator,
    peak: float,
) -> None:
    """Train once on the examples of a round, at rates that rise shortly and fall to zero."""
    order = random.permutation(len(found))
    rows = pack([found[number] for number in order], SHORT_LEN + 1)
    steps = len(rows.ids) // SAMPLE_ROWS
    for number, samples in enumerate(batches_of(rows, SAMPLE_ROWS)):
        factor = peak * min((number + 1) / WARMUP_STEPS, 1.0) * (1 - number / steps)
        inputs, targets = batches.take(SHORT_LEN, TEXT_ROWS)
        ids = torch.cat([inputs, targets[:, -1:]], dim=1)
        text = Rows(ids=ids, marks=torch.full_like(ids, Mark.TEXT))
        losses = step(trainer, text, samples, factor)
        if number % LOG_EVERY_STEPS == 0:
            shown = " ".join(f"{loss:.3f}" for loss in losses)
            print(f"step={number}/{steps} text, learned, unlearned: {shown}", flush=True)


def scores(samples: list[Sample]) -> str:
    """Return the shares of samples that pass the rules of the evaluation, and their length."""
    shares = {
        "clean": [is_clean(made.prompt.text, made.completion) for made in samples],
        "cut": [is_cut_clean(made.prompt.text, made.completion) for made in samples],
        "loop": [loops(made.completion.ids) for made in samples],
        "kept": [made.is_good for made in samples],
        "ended": [made.completion.has_ended for made in samples],
    }
    lengths = [len(made.completion.ids) for made in samples]
    parts = [f"{name}={sum(values) / len(values):.3f}" for name, values in shares.items()]
    return " ".join([f"samples={len(samples)}", *parts, f"mean_len={np.mean(lengths):.0f}"])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line, by default of the process's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of training files")
    parser.add_argument("--from-model", type=Path, required=True, help="exported weights")
    parser.add_argument("--export", type=Path, required=True, help="folder for the new weights")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=3000, help="completions per round")
    parser.add_argument("--first-round", type=int, default=0, help="rounds of earlier runs")
    parser.add_argument("--skip-heads", type=int, default=0, help="heads that these completed")
    parser.add_argument("--peak", type=float, default=PEAK, help="share of train's peak rates")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main() -> None:
    """Run ``--rounds`` rounds, each from the weights that the one before exported."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    random = np.random.default_rng(arguments.seed)
    stream: npt.NDArray[np.uint16] = np.load(arguments.work / "train.npy")
    trainer = Trainer(ModelConfig(), arguments.seed)
    trainer.start_from(arguments.from_model)
    # It compiles first: torch's compiler imports setuptools, which has to come before distutils,
    # which something that the engine needs imports.
    trainer.hidden(torch.zeros(TEXT_ROWS + SAMPLE_ROWS, SHORT_LEN, dtype=torch.int64))
    trainer.progress.stream = hashlib.sha256(stream.tobytes()).hexdigest()
    batches = Batches(stream, arguments.seed, trainer.progress.taken)
    folder: Path = arguments.export
    tokenizer_file = folder / "tokenizer.json"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_file.write_bytes((arguments.from_model / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    (newline_id,) = tokenizer.encode("\n").ids
    files = collect()
    prompts = training_heads(files, tokenizer, arguments.skip_heads)
    validation = validation_heads(files, tokenizer)
    export(trainer.model, folder)
    for number in range(arguments.rounds):
        chosen = list(islice(prompts, arguments.samples))
        first_seed = number * arguments.samples
        samplings = samplings_of(arguments.first_round + number)
        samples = Sampler(folder).sample(chosen, samplings, first_seed)
        print(f"round={number} {scores(samples)}", flush=True)
        found = examples(samples, newline_id)
        train_round(trainer, batches, found, random, arguments.peak)
        export(trainer.model, folder)
        trainer.write_record(folder)
        judged = Sampler(folder).sample(validation, (RECOMMENDED,), VALIDATION_SEED)
        print(f"round={number} validation {scores(judged)}", flush=True)


if __name__ == "__main__":
    main()
