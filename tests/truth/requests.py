"""The requests that every way of serving must answer alike."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.request.new_request import NewRequest
from tandem.sampling_params import SamplingParams
from tandem_embedded import GenerationParams

OUTPUT_LEN = 64
TARGET_PROMPT_LEN = 37
NEIGHBOUR_LENS = (1, 5, 16, 17, 33, 48, 70, 90)
VOCAB = range(3, 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthRequest:
    """A prompt with resolved sampling; `temperature` 0 is greedy, `max_tokens` the output's length."""

    prompt: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    max_tokens: int = OUTPUT_LEN

    @property
    def params(self) -> GenerationParams:
        """Parameters for an embedded engine."""
        return GenerationParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            ignore_eos=True,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            logit_bias=dict(self.logit_bias),
            logprobs=self.logprobs,
        )

    def row_sampling(self, choice: int = 0) -> SamplingParams:
        """Return the sampling params for a core or a runner."""
        sampling = self.params.row_sampling(self.seed, self.stop_token_ids)
        return replace(sampling, choice=choice)

    def new_request(
        self, handle: int, *, arrival_s: float = 0.0, choice: int = 0, num_choices: int = 1
    ) -> NewRequest:
        """Return the request for a core, with the handle of its first choice."""
        return NewRequest(
            request_id=str(handle),
            handle=handle,
            prompt=np.array(self.prompt, np.int32),
            sampling=self.row_sampling(choice),
            max_tokens=self.max_tokens,
            stop_token_ids=frozenset(self.stop_token_ids),
            arrival_s=arrival_s,
            num_choices=num_choices,
        )


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.choice(VOCAB) for _ in range(length))


GREEDY = TruthRequest(
    prompt=_prompt(TARGET_PROMPT_LEN, 1), temperature=0.0, top_k=0, top_p=1.0, seed=0
)
SEEDED = TruthRequest(
    prompt=_prompt(TARGET_PROMPT_LEN, 1), temperature=0.9, top_k=50, top_p=0.95, seed=2**63 + 11
)
TARGETS = {"greedy": GREEDY, "seeded": SEEDED}

NEIGHBOURS = tuple(
    TruthRequest(
        prompt=_prompt(length, 100 + length),
        temperature=(index % 3) * 0.6,
        top_k=(index % 2) * 20,
        top_p=1.0,
        seed=length,
    )
    for index, length in enumerate(NEIGHBOUR_LENS)
)
"""Eight requests of other lengths, greedy and sampled, that run beside a target."""

PENALISED = {
    "greedy": replace(
        GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logprobs=3
    ),
    "seeded": replace(
        SEEDED, repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=-0.2, min_p=0.02,
        logit_bias=((17, 1.5), (40, -3.0)), logprobs=0,
    ),
    "held": replace(
        SEEDED, temperature=0.7, top_k=0, presence_penalty=0.8, min_p=0.05, min_tokens=60,
        stop_token_ids=tuple(range(100, 160)), logprobs=2,
    ),
}  # fmt: skip
"""Requests with penalties, bans or log probabilities; `held` may end with its 61st token."""

PENALISED_NEIGHBOURS = tuple(
    replace(
        neighbour,
        frequency_penalty=(0.0, 0.4, 0.0, -0.1)[index % 4],
        repetition_penalty=(1.0, 1.0, 1.3, 0.9)[index % 4],
        logprobs=(None, 1, None, 5)[index // 2 % 4],
    )
    for index, neighbour in enumerate(NEIGHBOURS)
)
"""The same eight neighbours, some of them with penalties or log probabilities."""
