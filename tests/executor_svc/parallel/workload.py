"""Requests that a runner computes on one rank or on several, and its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import distributed

from executor_svc.config.settings import load_settings
from executor_svc.device.choice import choose_kernels
from executor_svc.device.memory_probe import HostMeter, Reading
from executor_svc.device.queue import Mark
from executor_svc.engine import load_engine
from executor_svc.model.loader import load_model
from executor_svc.model.marked_parts import Part
from executor_svc.model.weights import distinct_tensors
from executor_svc.parallel.process_groups import SINGLE, ProcessGroups
from kernels.layer_stack import LayerWeights
from tandem.errors import InternalError, InvalidConfig
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem.sampling_params import SamplingParams
from tests.executor_svc.stepping import (
    GREEDY,
    Bench,
    Row,
    admission,
    batch,
    forward_logits,
    random_tokens,
)

CPU = torch.device("cpu")
NUM_TOKENS = 32
"""Length of outputs; ranks wait for each other dozens of times in every token."""

SEEDED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=2**63 + 5)
REQUESTS = {
    "greedy": (9, GREEDY),
    "greedy, longer than a window": (40, GREEDY),
    "seeded": (17, SEEDED),
    "penalised": (
        12,
        replace(
            SEEDED,
            min_p=0.02,
            seed=7,
            repetition_penalty=1.3,
            frequency_penalty=0.6,
            presence_penalty=0.4,
            logit_bias=((5, 2.0), (200, -3.0)),
        ),
    ),
    "confined, with logprobs": (
        5,
        replace(SEEDED, seed=11, allowed_token_ids=tuple(range(3, 310, 7)), logprobs=4),
    ),
    "prompt logprobs": (21, replace(GREEDY, logprobs=2, prompt_logprobs=3)),
}
"""Length of the prompt and parameters by what is special."""


@dataclass(kw_only=True)
class Answer:
    """Results of a request, in the order of its tokens."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)


def answers(
    groups: ProcessGroups = SINGLE,
    directory: Path = Path(),
    *,
    kernels: str = "off",
    **options: object,
) -> dict[str, Answer]:
    """Compute all requests side by side: their prompts in one step, then decodes."""
    choose_kernels(CPU, kernels)
    bench = Bench.build(directory, groups=groups, collect_margins=True, **options)
    found = {name: Answer() for name in REQUESTS}
    admits, rows = [], []
    for slot, (length, sampling) in enumerate(REQUESTS.values()):
        prompt = random_tokens(length, seed=slot)
        blocks = bench.take_blocks(length + NUM_TOKENS)
        admits.append(admission(slot, prompt, blocks, sampling=sampling))
        rows.append(Row(slot, 0, length))
    _take(found, bench.runner.execute(batch(*rows, admits=admits), 1))
    for step in range(NUM_TOKENS - 1):
        rows = [Row(row.slot, row.start + row.num_tokens) for row in rows]
        _take(found, bench.runner.execute(batch(*rows), 2 + step))
    choose_kernels(CPU, "off")
    return found


def journey(groups: ProcessGroups, directory: Path) -> list[int]:
    """
    Return the tokens of a request that is swapped out, overwritten, swapped in elsewhere, suspended
    with its KV offloaded, and then followed by one that shares its first block and copies the next.
    """
    bench = Bench.build(directory, groups=groups, block_size=8, num_blocks=16, num_host_blocks=6)
    runner, prompt = bench.runner, random_tokens(20, seed=6)
    admit = admission(0, prompt, [1, 2, 3, 4], sampling=SEEDED)
    found = [_token(runner.execute(batch(Row(0, 0, 20), admits=[admit]), 1))]
    found += [_token(runner.execute(batch(Row(0, 20 + step)), 2 + step)) for step in range(2)]
    runner.execute(batch(releases=[0], swaps_out=[(1, 6), (2, 1), (3, 2)]), 4)
    other = admission(5, random_tokens(32, seed=9), [1, 2, 3, 4])
    runner.execute(batch(Row(5, 0, 32), admits=[other]), 5)
    runner.execute(batch(releases=[5]), 6)
    again = admission(2, prompt + found, [7, 3, 9, 5], num_cached_tokens=22, sampling=SEEDED)
    back = batch(Row(2, 22), admits=[again], swaps_in=[(6, 7), (1, 3), (2, 9)])
    found.append(_token(runner.execute(back, 7)))
    runner.suspend(KvMode.OFFLOAD)
    runner.resume()
    found += [_token(runner.execute(batch(Row(2, 23 + step)), 8 + step)) for step in range(4)]
    cached = 12
    shares = admission(3, prompt, [7, 10, 11, 12], num_cached_tokens=cached, sampling=SEEDED)
    follow = batch(Row(3, cached, len(prompt) - cached), admits=[shares], copies=[(3, 10)])
    found.append(_token(runner.execute(follow, 12)))
    return found


def compared(groups: ProcessGroups, directory: Path, planted: int) -> list[str]:
    """
    Return what the comparison of ranks says before the first step, after it and after a second one,
    in which sums have another last bit on the rank `planted`.
    """
    bench = Bench.build(directory, groups=groups)
    decoder, said = bench.runner._decoder, []

    def compare() -> None:
        try:
            decoder.compare_ranks()
            said.append("")
        except InternalError as error:
            said.append(error.message)

    compare()
    admit = bench.admit(0, random_tokens(30, seed=2))
    bench.runner.execute(batch(Row(0, 0, 30), admits=[admit]), 1)
    compare()
    if groups.rank == planted:
        add_up = decoder._ranks.sum
        decoder._ranks.sum = lambda partial: torch.nextafter(add_up(partial), torch.tensor(9.0))
    bench.runner.execute(batch(Row(0, 30)), 2)
    compare()
    return said


def bits(groups: ProcessGroups, directory: Path) -> list[torch.Tensor]:
    """Return the logits of a prompt alone and beside others, with batch_invariant."""
    found = []
    for others in (0, 3):
        bench = Bench.build(directory, groups=groups, batch_invariant=True)
        prompts = [random_tokens(30 - slot, seed=slot) for slot in range(1 + others)]
        admits = [bench.admit(slot, prompt) for slot, prompt in enumerate(prompts)]
        rows = [Row(slot, 0, len(prompt)) for slot, prompt in enumerate(prompts)]
        plan = batch(*reversed(rows), admits=admits)
        found.append(forward_logits(bench.runner, plan)[-len(prompts[0]) :])
    return found


def collectives(groups: ProcessGroups, directory: Path) -> tuple[dict[str, int], int]:
    """
    Return the number of collectives that follow the layers of a step, by what it samples, and the
    most numbers that any of them takes of a rank.
    """
    bench, shapes, counts = Bench.build(directory, groups=groups), [], {}
    plain = replace(GREEDY, temperature=0.8)
    asked = {
        "greedy": GREEDY,
        "plain": plain,
        "top_k": replace(plain, top_k=7),
        "top_p": replace(plain, top_p=0.9),
        "both": replace(plain, top_k=7, top_p=0.9, min_p=0.01),
        "penalised": replace(GREEDY, presence_penalty=0.5, logit_bias=((7, 1.0),)),
        "logprobs": replace(GREEDY, logprobs=3),
        "prompt logprobs": replace(GREEDY, prompt_logprobs=3),
    }
    forward = bench.runner._forward

    def layers(plan: Batch) -> tuple[Mark, torch.Tensor]:
        found = forward(plan)
        shapes.clear()
        return found

    bench.runner._forward = layers
    most = 0
    with _noted(shapes):
        for slot, (name, sampling) in enumerate(asked.items()):
            admit = bench.admit(slot, random_tokens(9, seed=slot), sampling=sampling)
            bench.runner.execute(batch(Row(slot, 0, 9), admits=[admit]), 1 + slot)
            counts[name] = len(shapes)
            most = max(most, *(shape[-1] for shape in shapes))
            bench.runner.execute(batch(releases=[slot]), 100 + slot)
    return counts, most


@contextmanager
def _noted(shapes: list[tuple[int, ...]]) -> Iterator[None]:
    """Note the shape that each collective takes of this rank."""
    before = distributed.all_reduce, distributed.all_gather

    def all_reduce(own: torch.Tensor, **named: object) -> None:
        shapes.append(tuple(own.shape))
        before[0](own, **named)

    def all_gather(found: list[torch.Tensor], own: torch.Tensor, **named: object) -> None:
        shapes.append(tuple(own.shape))
        before[1](found, own, **named)

    distributed.all_reduce, distributed.all_gather = all_reduce, all_gather
    try:
        yield
    finally:
        distributed.all_reduce, distributed.all_gather = before


def marked(groups: ProcessGroups, directory: Path) -> list[set[str]]:
    """Return the parts that a marked step and one after it go through."""
    bench, parts = Bench.build(directory, groups=groups), []
    for slot in range(2):
        seen: set[str] = set()

        def mark(name: str, part: Part, seen: set[str] = seen) -> Part:
            return lambda *args, **named: (seen.add(name), part(*args, **named))[1]

        if slot == 0:
            bench.runner.mark_parts(mark)
        plan = batch(Row(slot, 0, 9), admits=[bench.admit(slot, random_tokens(9, seed=slot))])
        bench.runner.execute(plan, 1 + slot)
        bench.runner.unmark_parts()
        parts.append(seen)
    return parts


@dataclass(kw_only=True)
class Held:
    """
    Contents of a rank's memory.

    Attributes:
        tensors: Weights by name.
        memory_bytes: Bytes of the memory behind them.
        counted_bytes: Bytes of the weights as the model counts them.
        kv_bytes: Bytes of the KV memory.
        fingerprint: The model's fingerprint.
    """

    tensors: dict[str, torch.Tensor]
    memory_bytes: int
    counted_bytes: int
    kv_bytes: int
    fingerprint: str


def held(groups: ProcessGroups, directory: Path) -> Held:
    """Load a model's share and return what the rank then holds."""
    bench = Bench.build(directory, groups=groups)
    model = bench.runner._model
    weights = model.weights
    tensors = {name: getattr(weights, name) for name in ("embedding", "norm", "lm_head")}
    for index, layer in enumerate(weights.layers):
        tensors |= {f"{index}.{name}": getattr(layer, name) for name in LayerWeights.__slots__}
    storages = {each.data_ptr(): each.nbytes() for each in map(_storage, distinct_tensors(weights))}
    return Held(
        tensors={name: tensor for name, tensor in tensors.items() if tensor is not None},
        memory_bytes=sum(storages.values()),
        counted_bytes=model.weight_bytes,
        kv_bytes=bench.kv.device_bytes,
        fingerprint=model.fingerprint,
    )


def refusal(groups: ProcessGroups, directory: Path) -> str:
    """Return the error with which the model is refused."""
    try:
        load_model(directory, groups=groups)
    except InvalidConfig as error:
        return str(error)
    return "loaded"


def refusal_of_engine(groups: ProcessGroups, directories: Sequence[Path]) -> str:
    """Return the error with which an engine is refused whose ranks have a directory each."""
    flags = [f"--model={directories[groups.rank]}", "--device=cpu", "--num-threads=1"]
    try:
        load_engine(load_settings(flags, {}), "boot", groups=groups)
    except InvalidConfig as error:
        return str(error)
    finally:
        choose_kernels(CPU, "off")
    return "loaded"


def growth(groups: ProcessGroups, directory: Path, tiny: Path) -> tuple[int, int]:
    """
    Return the bytes by which the peak of a rank grew while it loaded, and those of weights. Another
    model is loaded before, as libraries take memory when they are first used.
    """
    load_model(tiny, dtype="float32", groups=groups)
    models, meter = [], HostMeter(CPU)

    def load() -> None:
        models.append(load_model(directory, dtype="float32", groups=groups))

    return meter.peak_of(load), models[0].weight_bytes


def engine(
    groups: ProcessGroups, directory: Path, *flags: str, free_of_second: int
) -> dict[str, object]:
    """
    Load an engine as an executor does, all ranks but the first with another amount of free memory,
    and return what it says and a token that it samples.
    """
    loaded = load_settings([f"--model={directory}", "--device=cpu", "--num-threads=1", *flags], {})
    free = free_of_second if groups.rank else None
    made = load_engine(loaded, "boot", lambda device: _Meter(device, free), groups=groups)
    admit = admission(0, random_tokens(9, seed=1), [1], sampling=SEEDED)
    result = made.runner.execute(batch(Row(0, 0, 9), admits=[admit]), 1)
    choose_kernels(CPU, "off")
    about = made.description
    return {
        "fingerprint": about.model_fingerprint,
        "num_blocks": about.num_blocks,
        "max_model_len": about.max_model_len,
        "num_host_blocks": about.num_host_blocks,
        "kv_bytes_per_block": about.kv_bytes_per_block,
        "num_parameters": about.num_parameters,
        "token": _token(result),
    }


class _Meter(HostMeter):
    """A machine with so many bytes free, if they are given."""

    def __init__(self, device: torch.device, free: int | None) -> None:
        super().__init__(device)
        self._free = free

    def read(self) -> Reading:
        whole = super().read()
        return whole if self._free is None else replace(whole, free=self._free)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _token(result: StepResult) -> int:
    (token,) = result.token
    return int(token)


def _take(found: dict[str, Answer], result: StepResult) -> None:
    assert not result.row_errors
    names = list(found)
    slots = result.slot.tolist()
    for slot, token, margin in zip(slots, result.token, result.margin, strict=True):
        found[names[slot]].tokens.append(int(token))
        found[names[slot]].margins.append(float(margin))
    if result.logprobs is not None:
        for row, told in zip(result.logprobs.row, result.logprobs.entries(), strict=True):
            found[names[slots[row]]].logprobs += [told.logprob, *told.top_logprobs]
    if result.prompt_logprobs is not None:
        columns = result.prompt_logprobs
        for slot, told in zip(columns.slot, columns.columns.entries(), strict=True):
            found[names[slot]].prompt_logprobs += [told.logprob, *told.top_logprobs]
