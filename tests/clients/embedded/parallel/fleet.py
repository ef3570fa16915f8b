"""Engines with several fake runners, or with a real model on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.engine_config import EngineConfig
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem_embedded import Backend, GenerationParams, InferenceEngine, SimpleTokenizer
from tandem_embedded.backend import geometry_of
from tandem_embedded.results import CompletedRequest
from tests.clients.embedded.fake_backend import VOCAB_SIZE, FakeRunner

CONFIG = EngineConfig(
    block_size=4, max_num_blocks=64, max_batch_size=4, max_model_len=128, max_total_tokens=32
)


class WatchedRunner(FakeRunner):
    """A fake runner that calls `before` with each batch, where it computes."""

    before: Callable[[Batch], None] = staticmethod(lambda _batch: None)

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        self.before(batch)
        return super().execute(batch, step_id)


def fleet(
    count: int = 2, config: EngineConfig = CONFIG, **settings
) -> tuple[InferenceEngine, list[WatchedRunner]]:
    """Return an engine over so many fake runners."""
    runners = [WatchedRunner(geometry_of(config)) for _ in range(count)]
    backends = [
        Backend(
            runner=runner,
            num_slots=config.max_batch_size,
            max_positions=config.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
        )
        for runner in runners
    ]
    settings = {"tokenizer": SimpleTokenizer()} | settings
    return InferenceEngine(config, backend=backends, **settings), runners


def by_id(completed: Sequence[CompletedRequest]) -> list[CompletedRequest]:
    """Return the requests in the order in which they were submitted."""
    return sorted(completed, key=lambda request: request.request_id)


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
