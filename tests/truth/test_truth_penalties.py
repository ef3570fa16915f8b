"""
Penalties, cuts, bans and log probabilities on real models: they are right, and the same however a
request is served, also with several steps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kernels.sampling import reference
from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from tandem.engine_config import EngineConfig
from tandem.link.results import StepResult
from tandem_embedded import CompletedRequest, InferenceEngine
from tests.kernels.sampling.edit_oracle import RowEdits, edited_row
from tests.kernels.sampling.rows import make_columns
from tests.model_zoo import FAMILIES
from tests.threads import NUM_THREADS
from tests.truth.equality import LOGPROB_NOISE, Comparison, assert_same_logprobs
from tests.truth.requests import GREEDY, OUTPUT_LEN, PENALISED, PENALISED_NEIGHBOURS, TruthRequest
from tests.truth.served import SHARING, Served, compare, served_alone

WINDOWS = (
    pytest.param(1, marks=pytest.mark.slow),
    2,
    pytest.param(4, marks=pytest.mark.slow),
)
EVERYDAY = "llama_gqa_llama3_rope"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return FAMILIES[EVERYDAY](tmp_path_factory.mktemp("models") / EVERYDAY)


def build_engine(model_dir: Path, *, window: int, num_blocks: int = 300, **options):
    return InferenceEngine(
        EngineConfig(
            block_size=8,
            max_num_blocks=num_blocks,
            max_batch_size=12,
            max_model_len=160,
            max_total_tokens=48,
            memory_threshold=1.0,
        ),
        model_dir,
        dtype="float32",
        num_threads=NUM_THREADS,
        collect_margins=True,
        window=window,
        swap_space_gb=options.pop("swap_space_gb", 0.0),
        options=CoreOptions(schedule_conservativeness=0.0, prefix_caching=False, **options),
    )


def serve_all(
    engine: InferenceEngine, requests: Sequence[TruthRequest], *, preempt_at: int | None = None
) -> list[CompletedRequest]:
    """Serve all requests at once; preempt the first one after so many tokens, if asked."""
    ids = [engine.submit_request(list(one.prompt), one.params) for one in requests]
    finished: dict[int, CompletedRequest] = {}
    while engine.has_pending_work():
        if preempt_at is not None and len(engine.output_tokens(ids[0])) >= preempt_at:
            engine.preempt(ids[0])
            preempt_at = None
        finished |= {one.request_id: one for one in engine.step()}
    assert preempt_at is None
    assert 0 == engine.get_memory_stats().used_blocks
    return [finished[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def references(model_dir) -> dict[str, CompletedRequest]:
    """Return the completion of each target served alone, with one step in flight."""
    engine = build_engine(model_dir, window=1)
    return {name: serve_all(engine, [target])[0] for name, target in PENALISED.items()}


def check(expected: CompletedRequest, found: CompletedRequest, comparison: Comparison) -> None:
    """Check that tokens are equal, and the log probabilities of each."""
    what = f"request {found.request_id}"
    comparison.check(expected.output_tokens, found.output_tokens, expected.margins, what)
    assert len(found.output_tokens) == len(found.logprobs)
    assert_same_logprobs(expected.logprobs, found.logprobs, expected.margins)


def hugging_face(model_dir: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


class TestAgainstTransformers:
    def test_repetition_penalty_is_that_of_transformers(self, model_dir):
        """
        Greedy tokens with a repetition penalty are those that `transformers` generates with it.
        """
        prompt = torch.tensor([GREEDY.prompt])
        output = hugging_face(model_dir).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=OUTPUT_LEN,
            do_sample=False,
            repetition_penalty=1.4,
            eos_token_id=None,
            pad_token_id=0,
        )
        target = TruthRequest(
            prompt=GREEDY.prompt, temperature=0.0, top_k=0, top_p=1.0, seed=0,
            repetition_penalty=1.4,
        )  # fmt: skip
        (found,) = serve_all(build_engine(model_dir, window=2), [target])
        comparison = Comparison()
        expected = output[0, len(GREEDY.prompt) :].tolist()
        comparison.check(expected, found.output_tokens, found.margins, "transformers")
        comparison.assert_not_vacuous()

    @pytest.mark.parametrize("min_p", [0.05, 0.3])
    def test_min_p_keeps_what_transformers_keeps(self, min_p):
        """
        The ids that min_p keeps are those that `transformers` keeps.
        """
        logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(4)) * 2
        warped = transformers.MinPLogitsWarper(min_p)(torch.zeros(50, 1), logits.clone())
        columns = make_columns(50, min_p=min_p)
        scaled = reference.scale(logits, columns.temperature)
        kept = reference.keep(scaled, columns.top_k, columns.top_p, columns.min_p).mask
        assert torch.equal(warped.isfinite(), kept)

    @pytest.mark.slow
    def test_greedy_tokens_follow_the_formula(self, model_dir, references):
        """
        Each greedy token is the best id of `transformers`' logits after penalties for its prompt
        and output so far, and log probabilities are those of the logits before penalties.
        """
        target, found = PENALISED["greedy"], references["greedy"]
        whole = torch.tensor([[*target.prompt, *found.output_tokens]])
        with torch.inference_mode():
            logits = hugging_face(model_dir)(whole).logits[0, len(target.prompt) - 1 : -1]
        told = logits.log_softmax(1).numpy()
        num_decided = 0
        for at, (token, margin) in enumerate(zip(found.output_tokens, found.margins, strict=True)):
            row = RowEdits(
                prompt=target.prompt,
                output=tuple(found.output_tokens[:at]),
                repetition=target.repetition_penalty,
                frequency=target.frequency_penalty,
                presence=target.presence_penalty,
            )
            num_decided += margin > LOGPROB_NOISE
            if margin > LOGPROB_NOISE:
                assert token == edited_row(logits[at].double().numpy(), row).argmax(), at
            entry = found.logprobs[at]
            assert told[at, token] == pytest.approx(entry.logprob, abs=LOGPROB_NOISE)
            best = np.sort(told[at])[::-1][:3]
            np.testing.assert_allclose(entry.top_logprobs, best, atol=LOGPROB_NOISE)
        assert num_decided > OUTPUT_LEN // 2

    def test_bans_hold_until_their_time(self, references):
        """
        The 60 ids that end the output are absent from its first 60 tokens.
        """
        found, target = references["held"], PENALISED["held"]
        assert not set(found.output_tokens[:60]) & set(target.stop_token_ids)
        assert len(found.output_tokens) > 60


@pytest.mark.parametrize("window", WINDOWS)
class TestEveryWayOfServing:
    def test_among_others_and_preempted(self, model_dir, references, window):
        """
        Targets among requests with and without penalties, in chunks and one of them preempted, get
        the tokens and log probabilities that they get alone.
        """
        comparison = Comparison()
        names = list(PENALISED)
        engine = build_engine(model_dir, window=window)
        requests = [*PENALISED.values(), *PENALISED_NEIGHBOURS]
        found = serve_all(engine, requests, preempt_at=20)
        for name, one in zip(names, found, strict=False):
            check(references[name], one, comparison)
        assert 1 == engine.get_metrics().preemptions
        comparison.assert_not_vacuous()

    @pytest.mark.parametrize(
        "mode",
        [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP],
    )
    def test_in_little_memory(self, model_dir, references, window, mode):
        """
        Targets that are preempted in little memory, by recompute or swap, get the tokens and log
        probabilities that they get in plenty.
        """
        comparison = Comparison()
        engine = build_engine(
            model_dir, window=window, num_blocks=30, preemption_mode=mode, swap_space_gb=0.01
        )
        for name, one in zip(PENALISED, serve_all(engine, [*PENALISED.values()]), strict=True):
            check(references[name], one, comparison)
        assert engine.get_metrics().preemptions > 0
        comparison.assert_not_vacuous()

    def test_after_a_lost_step(self, model_dir, references, window, monkeypatch):
        """
        A failed step that loses all of the executor's state changes neither tokens nor log
        probabilities.
        """
        engine = build_engine(model_dir, window=window)
        runner = engine._backends[0].runner
        compute, num_steps = runner.execute, 0

        def fail_once(batch, step_id) -> StepResult:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 33:
                raise RuntimeError("the device is gone")
            return compute(batch, step_id)

        monkeypatch.setattr(runner, "execute", fail_once)
        comparison = Comparison()
        for name, one in zip(PENALISED, serve_all(engine, [*PENALISED.values()]), strict=True):
            check(references[name], one, comparison)
        assert num_steps > OUTPUT_LEN
        comparison.assert_not_vacuous()

    @pytest.mark.slow
    def test_choices_of_one_prompt(self, model_dir, window):
        """
        Every choice that forks off a shared prompt counts its own output alone.
        """
        comparison = Comparison()
        alone, forked = served_alone(model_dir), Served(model_dir, replace(SHARING, window=window))
        for target in (PENALISED["seeded"], PENALISED["held"]):
            first = forked.submit(target, num_choices=3)
            found = forked.run(in_depth=True)
            for choice in range(3):
                compare(comparison, alone(target, choice), found[first + choice], f"{choice}")
        assert forked.num_copies > 0
        comparison.assert_not_vacuous()
