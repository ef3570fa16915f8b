"""A step that was launched on the device, and its result once the device has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor_svc.device.queue import DeviceQueue, Mark
from executor_svc.step.outcome import StepOutcome
from executor_svc.step.prompt_scores import PromptScores
from kernels.sampling import Logprobs, Sampled
from tandem.link.batch import UInt32Column
from tandem.link.results import StepResult, StepTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """
    A launched step, with the state it needs as of its launch, because slots may change afterwards.

    Attributes:
        boot_id: Id of the process.
        step_id: Id of the step.
        outcome: Waits for the rows that sampled, and returns them on the host.
        scores: Waits for the scores of prompt tokens likewise; None if no row asked for any.
        generation: uint32 ``[S]``, generation of every slot after the batch.
        bad_input_slots: Slots that computed a token outside the vocabulary.
        vocab_size: Size of the vocabulary, for messages.
        graph: As in `StepResult`.
        device_memory_bytes: Bytes of weights and KV.
        started: Time at which the device began to compute the step, marked after all that the host
            does before a launch: a device without work would seem busy meanwhile.
        forwarded: Time at which it had computed hidden states or logits, or, if the same launch
            also draws, the tokens.
        ended: Time at which it had the tokens; those of another stage may be on their way.
    """

    boot_id: str
    step_id: int
    outcome: Callable[[], StepOutcome]
    scores: Callable[[], PromptScores] | None
    generation: UInt32Column
    bad_input_slots: list[int]
    vocab_size: int
    graph: int
    device_memory_bytes: int
    started: Mark
    forwarded: Mark
    ended: Mark

    def result(self) -> StepResult:
        """Wait for the device and return the step's result; called once, on any thread."""
        outcome = self.outcome()
        scores = None if self.scores is None else self.scores()
        errors = outcome.row_errors(
            self.bad_input_slots,
            self.generation,
            self.vocab_size,
            bad_prompt_slots=() if scores is None else scores.bad_slots,
        )
        outcome = outcome.without(errors)
        failed = np.array([error.slot for error in errors], np.int64)
        return StepResult(
            boot_id=self.boot_id,
            step_id=self.step_id,
            slot=outcome.slot,
            generation=self.generation[outcome.slot],
            position=outcome.position,
            token=outcome.token,
            row_errors=errors,
            timings=StepTimings(
                forward_ns=self.forwarded.ns_since(self.started),
                sample_ns=self.ended.ns_since(self.forwarded),
                total_ns=self.ended.ns_since(self.started),
            ),
            graph=self.graph,
            device_memory_bytes=self.device_memory_bytes,
            margin=outcome.margin,
            logprobs=outcome.logprobs,
            prompt_logprobs=None if scores is None else scores.columns(self.generation, failed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """
    The tokens of a launched step, which the device has or will have.

    Attributes:
        fetch: Begins to copy them to the host; the function that it returns waits for them.
        started: As in `PendingStep`.
        forwarded: As in `PendingStep`.
        graph: As in `StepResult`.
        scores: Scores of prompt tokens, if a row asked for any.
        queue: The queue that fetches them, if it is not the device's own.
    """

    fetch: Callable[[DeviceQueue], Callable[[], Sampled]]
    started: Mark
    forwarded: Mark
    graph: int = 0
    scores: PromptScores | None = None
    queue: DeviceQueue | None = None

    def fetch_scores(self, queue: DeviceQueue) -> Callable[[], PromptScores] | None:
        """Begin to copy the scores to the host; return a function that waits, None without any."""
        return None if self.scores is None else self.scores.fetch(queue)


def nothing_sampled(device: torch.device, *, with_margin: bool) -> Sampled:
    """Return the empty result of a step in which no row samples."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    margin = torch.empty(0, device=device) if with_margin else None
    return Sampled(token=none, valid=none.bool(), margin=margin)


def fetch_sampled(sampled: Sampled, queue: DeviceQueue) -> Callable[[], Sampled]:
    """Begin to copy sampled tokens to the host; return a function that waits for them."""
    margin, told = sampled.margin, sampled.logprobs
    tensors = [sampled.token, sampled.valid]
    tensors += [] if margin is None else [margin]
    tensors += [] if told is None else [told.chosen, told.top_token, told.top]
    tensors += [] if told is None or told.requested is None else [told.requested]
    wait = queue.fetch(tensors)

    def collect() -> Sampled:
        token, valid, *rest = wait()
        return Sampled(
            token=token,
            valid=valid,
            margin=None if margin is None else rest.pop(0),
            logprobs=None if told is None else _on_host(told, rest),
        )

    return collect


def fetch_tokens(tokens: Tensor, queue: DeviceQueue) -> Callable[[], Sampled]:
    """As `fetch_sampled`, of tokens int32 ``[R]`` that are -1 where not valid."""
    wait = queue.fetch([tokens])

    def collect() -> Sampled:
        (found,) = wait()
        return Sampled(token=found.clamp(min=0).to(torch.int64), valid=found >= 0)

    return collect


def _on_host(told: Logprobs, columns: list[Tensor]) -> Logprobs:
    chosen, top_token, top, *requested = columns
    return replace(
        told,
        chosen=chosen,
        top_token=top_token,
        top=top,
        requested=requested[0] if requested else None,
    )
