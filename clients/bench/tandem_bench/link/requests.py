"""Requests that are long enough not to end while they are measured."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from scheduler_svc.ipc.messages import Submit
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tandem.sampling_params import SamplingParams

NUM_BLOCKS = 1 << 20
BLOCK_SIZE = 16
MAX_MODEL_LEN = 65_536
_USABLE_SHARE = 0.8
"""Share of the blocks that requests may fill; prompts are not admitted beyond it."""
SHORTEST_PROMPT = 64
PROMPT_LENS = 16
"""Number of prompt lengths; with 16, a sixteenth of the rows begin a new block in each step."""
_LOWEST_ID, _HIGHEST_ID = 3, 4000


def max_tokens_for(rows: int) -> int:
    """Return the output tokens that fit for each row of an executor: many seconds of steps."""
    longest = SHORTEST_PROMPT + PROMPT_LENS
    room = int(NUM_BLOCKS * BLOCK_SIZE * _USABLE_SHARE) // rows
    return min(MAX_MODEL_LEN, room) - longest - BLOCK_SIZE


def submits(rows: int, executors: int) -> Iterator[Submit]:
    """Yield one request per row of each executor, as a frontend submits it to the core."""
    for number, prompt in enumerate(_prompts(rows * executors)):
        yield Submit(
            stream_id=number,
            request_id=f"bench-{number}",
            prompt=prompt.tobytes(),
            sampling=SamplingParams(top_p=1.0, seed=number),
            max_tokens=max_tokens_for(rows),
            eos_token_ids=(),
            stop_token_ids=(),
            arrival_s=time.monotonic(),
            deadline_s=None,
        )


def generate_requests(clients: int, choices: int, executors: int = 1) -> list[bytes]:
    """
    Make one serialized request per client, each with `choices` rows (parallel sampling), which so
    many executors share.
    """
    return [
        GenerateRequest(
            token_ids={"ids": prompt.tolist()},
            sampling={"temperature": 1.0, "seed": number},
            stopping={
                "max_tokens": max_tokens_for(clients * choices // executors),
                "ignore_eos": True,
            },
            n=choices,
        ).SerializeToString()
        for number, prompt in enumerate(_prompts(clients))
    ]


def _prompts(count: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    random = np.random.default_rng(0)
    for number in range(count):
        length = SHORTEST_PROMPT + number % PROMPT_LENS
        yield random.integers(_LOWEST_ID, _HIGHEST_ID, length, np.int32)
