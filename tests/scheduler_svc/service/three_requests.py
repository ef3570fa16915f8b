"""Three requests of a service, from their start to their end, and checks of their outputs."""

from __future__ import annotations

from scheduler_svc.ipc import snapshot
from tests.scheduler_svc.service.fakes.arithmetic_runner import expected_outputs

PROMPTS = [[5, 6, 7], [8], list(range(20, 40))]
NUM_PROMPT_TOKENS = sum(len(prompt) for prompt in PROMPTS)


def start(bench, frontend=None, *, num_tokens: int = 40, until: int = 1):
    """Submit three requests and wait until the first has some output; return their frontend."""
    if not bench.link.is_up:
        bench.link.boot("boot-1")
    frontend = frontend or bench.frontend()
    bench.until(lambda: frontend.availabilities[-1].executor_attached)
    for stream_id, prompt in enumerate(PROMPTS):
        frontend.submit(stream_id, prompt, num_tokens)
    bench.until(lambda: len(frontend.tokens.get(0, [])) >= until)
    return frontend


def assert_all_complete(bench, frontend, num_tokens: int = 40) -> None:
    bench.until(lambda: len(frontend.ended) == len(PROMPTS))
    for stream_id, prompt in enumerate(PROMPTS):
        assert expected_outputs(prompt, num_tokens) == frontend.tokens[stream_id]
    assert {} == frontend.failed


def stats_of(bench, frontend):
    return snapshot.decode_stats(bench.reply(frontend, "stats").result)


def assert_nothing_recomputed(bench, frontend) -> None:
    """Check that every prompt token was computed once, and each step of the session once."""
    stats = stats_of(bench, frontend)
    assert (NUM_PROMPT_TOKENS, 0, 1) == (
        stats.prefill_tokens,
        stats.recomputed_tokens,
        stats.executor_sessions,
    )
    assert bench.link.end.last_completed_step_id == bench.link.runner.num_steps
