"""Engines with several fake runners, or with a real model on several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.engine_config import EngineConfig
from tandem.errors import SessionLost
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem_embedded import Backend, GenerationParams, InferenceEngine, SimpleTokenizer
from tandem_embedded.backend import geometry_of
from tandem_embedded.results import CompletedRequest
from tests.clients.embedded.fake_backend import VOCAB_SIZE, FakeRunner, expected

CONFIG = EngineConfig(
    block_size=4, max_num_blocks=64, max_batch_size=4, max_model_len=128, max_total_tokens=32
)
EIGHT = GenerationParams(max_tokens=8)
SHORT_PROMPTS = [f"prompt {number:02}" for number in range(16)]

TURN_S = 30.0
"""Seconds that a runner waits for another one's step; long on a busy machine."""


def backend_of(
    runner: FakeRunner, num_stages: int = 1, device: str = "cpu", config: EngineConfig = CONFIG
) -> Backend:
    """Return a runner with its limits."""
    return Backend(
        runner=runner,
        num_slots=config.max_batch_size,
        max_positions=config.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        device=device,
        num_stages=num_stages,
    )


class WatchedRunner(FakeRunner):
    """A fake runner that calls `before` with each batch, where it computes."""

    before: Callable[[Batch], None] = staticmethod(lambda _batch: None)

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        self.before(batch)
        return super().execute(batch, step_id)


class Turns:
    """Two runners whose first steps fail, each once the other has begun its next one of these."""

    def __init__(self, num_failures: int) -> None:
        """
        Args:
            num_failures: Number of steps of each runner that fail.
        """
        self._num_failures = num_failures
        self._begun = [0, 0]
        self._changed = threading.Condition()

    def fail(self, number: int) -> None:
        """Raise the error of a runner's step, in its turn, if it is one of these."""
        other = 1 - number
        with self._changed:
            self._begun[number] += 1
            self._changed.notify_all()
            if self._begun[number] > self._num_failures:
                return
            # The first runner fails first, and the second one last.
            wanted = min(self._begun[number] + number, self._num_failures)
            assert self._changed.wait_for(lambda: self._begun[other] >= wanted, TURN_S)
            raise SessionLost("a step failed in its turn")


def fleet(
    count: int = 2, config: EngineConfig = CONFIG, **settings
) -> tuple[InferenceEngine, list[WatchedRunner]]:
    """Return an engine over so many fake runners."""
    runners = [WatchedRunner(geometry_of(config)) for _ in range(count)]
    backends = [backend_of(runner, config=config) for runner in runners]
    settings = {"tokenizer": SimpleTokenizer()} | settings
    return InferenceEngine(config, backend=backends, **settings), runners


def by_id(completed: Sequence[CompletedRequest]) -> list[CompletedRequest]:
    """Return the requests in the order in which they were submitted."""
    return sorted(completed, key=lambda request: request.request_id)


def submit_all(engine: InferenceEngine) -> None:
    """Submit as many requests as keep several runners busy."""
    for prompt in SHORT_PROMPTS:
        engine.submit_request(prompt, EIGHT)


def check_all(engine: InferenceEngine) -> None:
    """Check that all of these requests get their tokens, and that nothing is left behind."""
    found = [request.output_tokens for request in by_id(engine.run())]
    assert [expected(prompt, 8) for prompt in SHORT_PROMPTS] == found
    assert 0 == engine.get_memory_stats().used_blocks
    engine.check_integrity()


PROMPTS = [f"The quick brown fox {number} jumps over" for number in range(6)]
SEEDED = GenerationParams(max_tokens=24, temperature=0.9, top_k=40, seed=7, ignore_eos=True)
REQUESTS = {
    "greedy": GenerationParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    "seeded": SEEDED,
    "several choices": GenerationParams(max_tokens=12, seed=3, n=3, ignore_eos=True),
    "penalised": GenerationParams(
        max_tokens=24, seed=11, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True
    ),
    "logprobs": GenerationParams(
        max_tokens=12, temperature=0.0, logprobs=2, prompt_logprobs=2, ignore_eos=True
    ),
    "stop string": GenerationParams(max_tokens=24, seed=5, stop=("e",)),
}
"""Parameters by what is special."""


def build(model_dir: Path, **settings) -> InferenceEngine:
    """Return an engine over a real, tiny model."""
    config = EngineConfig(
        block_size=8,
        max_num_blocks=128,
        max_batch_size=4,
        max_model_len=256,
        max_total_tokens=64,
        memory_threshold=1.0,
    )
    settings = {"dtype": "float32", "num_threads": 1} | settings
    return InferenceEngine(settings.pop("config", config), model_dir, **settings)


Answer = list[tuple[list[int], str, list[float], list[float]]]
"""Tokens, text, log probabilities and those of the prompt, of each choice."""


def answers(engine: InferenceEngine, prompts: Sequence[str] = PROMPTS) -> list[Answer]:
    """Serve every kind of request for every prompt, all together."""
    for prompt in prompts:
        for params in REQUESTS.values():
            engine.submit_request(prompt, params)
    return [answer_of(request) for request in by_id(engine.run())]


def answer_of(request: CompletedRequest) -> Answer:
    """Return what must not depend on where a request was computed."""
    assert request.success, request.error
    return [
        (
            choice.output_tokens,
            choice.output_text,
            [round(one.logprob, 3) for one in choice.logprobs],
            [round(one.logprob, 3) for one in choice.prompt_logprobs],
        )
        for choice in request.choices
    ]
