"""Numbers that a logits hook reads of each request, through all that befalls requests."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tandem.engine_config import EngineConfig
from tandem.sampling_params import SamplingParams
from tandem_embedded import (
    DEFAULT_METADATA_TYPES,
    ConfigError,
    CoreOptions,
    FinishReason,
    GenerationParams,
    InferenceEngine,
    OnPressure,
    ValidationError,
    VictimRule,
)
from tests.clients.embedded.fake_backend import engine_and_runner
from tests.model_zoo import llama_mha

MISFIT = "Request added to context with invalid metadata types: "
STEER = ("steer", torch.float32, True)
OWN_TYPES = [STEER, ("group", torch.int64, False), ("is_checked", torch.bool, True)]
ALL_TYPES = [*DEFAULT_METADATA_TYPES, *OWN_TYPES, ("seed", "int64", True)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return llama_mha(tmp_path_factory.mktemp("models") / "llama_mha")


def hooked(model_dir, hook, types=None, **settings) -> InferenceEngine:
    limits = EngineConfig(
        block_size=4, max_num_blocks=20, max_batch_size=6, max_model_len=48, max_total_tokens=32,
        memory_threshold=1.0,
    )  # fmt: skip
    settings = {"dtype": "float32", "num_threads": 1, "logits_hook": hook} | settings
    return InferenceEngine(limits, model_dir, request_metadata_types=types, **settings)


class Requests:
    """Requests whose second token is a number of their own, by which a hook tells them apart."""

    def __init__(self) -> None:
        self.facts: dict[int, dict[str, float]] = {}
        self.num_rows_checked = 0

    def new(self, number: int, chance: random.Random) -> tuple[list[int], GenerationParams]:
        params = GenerationParams(
            max_tokens=chance.randint(1, 24),
            temperature=chance.choice([0.0, 0.5, 1.25]),
            top_k=chance.randint(0, 40),
            top_p=chance.choice([0.25, 0.5, 1.0]),
            seed=chance.getrandbits(63),
            ignore_eos=True,
            stop_token_ids=() if chance.random() < 0.5 else (200 + number % 50,),
            logprobs=chance.choice([None, 0, 3]),
            prompt_logprobs=chance.choice([None, 1]),
            metadata={
                "steer": chance.choice([-1.5, 0.0, 2.25]),
                "group": chance.getrandbits(62),
                "is_checked": chance.random() < 0.5,
            },
        )
        self.facts[number] = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "seed": params.seed,
            "termination_id": min(params.stop_token_ids, default=-1),
            "return_log_probs": params.logprobs is not None,
            "skip_prompt_log_probs": params.prompt_logprobs is None,
            "top_n_logprobs": params.logprobs or 0,
            **params.metadata,
        }
        prompt = [1 + number // 250, 1 + number % 250, *range(1, chance.randint(1, 9))]
        return prompt, params

    def check(self, _, rows) -> None:
        """Compare every number of every row with its request's."""
        of_rows = {label: rows[label].tolist() for label, _, _ in ALL_TYPES}
        for row, tokens in enumerate(rows.tokens().tolist()):
            facts = self.facts[250 * (tokens[0] - 1) + tokens[1] - 1]
            assert facts == {label: column[row] for label, column in of_rows.items()}
            self.num_rows_checked += 1


@pytest.mark.parametrize("victim_rule", [VictimRule.LAST_ADMITTED, VictimRule.PAUSED_BUDGET])
def test_rows_match_their_requests_after_any_finishes_and_preemptions(model_dir, victim_rule):
    """
    After more than 100 random finishes, aborts, pauses and preemptions each row of each step still
    has the numbers of its own request.
    """
    requests, chance = Requests(), random.Random(7)
    options = CoreOptions(
        victim_rule=victim_rule,
        on_pressure=OnPressure.QUEUE,
        schedule_conservativeness=0.0,
    )
    engine = hooked(model_dir, requests.check, ALL_TYPES, options=options)
    live, ended = set(), []
    for number in range(110):
        live.add(engine.submit_request(*requests.new(number, chance)))
        for _ in range(chance.randint(0, 4)):
            ended += engine.step()
        live -= {one.request_id for one in ended}
        if live and chance.random() < 0.3:
            engine.preempt(chance.choice(sorted(live)))
        if live and chance.random() < 0.1:
            aborted = chance.choice(sorted(live))
            engine.abort(aborted)
            live.discard(aborted)
    ended += engine.run()
    reasons = {one.finish_reason for one in ended}
    assert 110 == len(ended)
    assert {FinishReason.MAX_TOKENS, FinishReason.CANCELLED} <= reasons
    assert all(one.error is None for one in ended)
    assert engine.get_metrics().preemptions > 20
    assert requests.num_rows_checked > 500


def test_a_hook_steers_each_choice_of_a_request(model_dir):
    """
    Every choice of a request has its metadata; another request beside it has its own.
    """

    def steer(logits, rows):
        logits[:, 9] += rows["steer"]

    engine = hooked(model_dir, steer, [STEER])
    params = GenerationParams(max_tokens=5, n=2, seed=1, metadata={"steer": 1e4}, ignore_eos=True)
    steered = engine.submit_request([5, 6], params)
    plain = GenerationParams(max_tokens=5, temperature=0.0, metadata={"steer": 0}, ignore_eos=True)
    engine.submit_request([5, 6], plain)
    by_id = {one.request_id: one for one in engine.run()}
    assert [[9] * 5] * 2 == [choice.output_tokens for choice in by_id.pop(steered).choices]
    alone = InferenceEngine(engine.config, model_dir, dtype="float32", num_threads=1)
    expected = alone.complete(
        [5, 6], GenerationParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    )
    (other,) = by_id.values()
    assert expected.output_tokens == other.output_tokens


def test_without_types_a_hook_reads_the_default_ones(model_dir):
    """
    The default types are those of Megatron Core, and no request must set anything for them.
    """
    seen = {}

    def look(_, rows):
        seen.update({label: rows[label] for label, _, _ in DEFAULT_METADATA_TYPES})

    params = GenerationParams(max_tokens=1, temperature=0.5, top_k=3, top_p=0.5, logprobs=2)
    hooked(model_dir, look).complete([5, 6], params)
    assert {
        "temperature": (torch.float32, [0.5]),
        "top_k": (torch.int32, [3]),
        "top_p": (torch.float32, [0.5]),
        "termination_id": (torch.int64, [257]),
        "return_log_probs": (torch.bool, [True]),
        "skip_prompt_log_probs": (torch.bool, [True]),
        "top_n_logprobs": (torch.int32, [2]),
    } == {label: (column.dtype, column.tolist()) for label, column in seen.items()}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "metadata lacks 'steer', a float32 of request_metadata_types"),
        ({"steer": 1.0, "group": 1}, "metadata lacks 'is_checked'"),
        ({"steer": 1.0, "spin": 1}, "no 'spin' that a request sets, it has steer, group, is_check"),
        ({"temperature": 1.0}, "request_metadata_types has no 'temperature' that a request sets"),
        ({"steer": "up"}, "'steer' must be a float32, got 'up'"),
        ({"steer": True}, "'steer' must be a float32, got True"),
        ({"steer": float("nan")}, "'steer' must be a float32, got nan"),
        ({"steer": 1e39}, "'steer' must be a float32, got 1e"),
        ({"steer": 10**400}, "'steer' must be a float32, got 1000"),
        ({"steer": 1, "group": 1.0}, "'group' must be a int64, got 1.0"),
        ({"steer": 1, "group": 2**63}, "'group' must be a int64, got 9223372036854775808"),
        ({"steer": 1, "group": 1, "is_checked": 1}, "'is_checked' must be a bool, got 1"),
        ([("steer", 1.0)], "metadata must map labels to numbers"),
    ],
)
def test_a_request_whose_metadata_do_not_fit_is_refused(metadata, words):
    """
    A label that lacks, is unknown, or has a number of another type is told with the submission.
    """
    engine, _ = engine_and_runner(request_metadata_types=OWN_TYPES)
    with pytest.raises(ValidationError) as caught:
        engine.submit_request([5, 6], GenerationParams(metadata=metadata))
    assert ("INVALID_PARAMETER", "metadata") == (caught.value.reason, caught.value.field)
    assert MISFIT in caught.value.message
    assert words in caught.value.message
    assert not engine.has_pending_work()


def test_an_engine_without_types_takes_no_metadata():
    """
    Metadata that nothing reads are refused.
    """
    engine, _ = engine_and_runner()
    with pytest.raises(ValidationError, match=f"{MISFIT}.*no 'steer'.*it has none"):
        engine.submit_request([5, 6], GenerationParams(metadata={"steer": 1.0}))


def test_a_runner_of_the_callers_gets_the_numbers_with_the_admission():
    """
    Numbers come in the order of the types, numpy's as Python's, and sampling parameters as ever.
    """
    engine, runner = engine_and_runner(request_metadata_types=[*OWN_TYPES, *DEFAULT_METADATA_TYPES])
    admitted: list[SamplingParams] = []
    runner.fits = lambda batch: not admitted.extend(one.sampling for one in batch.admits)
    own = {"steer": np.float32(0.5), "group": np.int32(7), "is_checked": np.bool_(True)}
    params = GenerationParams(max_tokens=1, top_k=3, stop_token_ids=(9, 8), metadata=own)
    engine.submit_request([5, 6], params)
    engine.run()
    (sampling,) = admitted
    assert 3 == sampling.top_k
    assert (
        ("steer", 0.5), ("group", 7), ("is_checked", True), ("termination_id", 8),
        ("return_log_probs", False), ("skip_prompt_log_probs", True), ("top_n_logprobs", 0),
    ) == sampling.row_metadata  # fmt: skip


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ("steer", "must be a list of tuples"),
        ([("steer", torch.float32)], "must have tuples of label, dtype and on_gpu"),
        ([("", torch.float32, True)], "begins with a label"),
        ([("steer", torch.float32, 1)], "ends with True or False"),
        ([("steer", torch.float16, True)], "must be one of float32, int32, int64, bool"),
        ([STEER, STEER], "has the label 'steer' 2 times"),
        ([("top_k", torch.int64, True)], "'top_k' is a parameter of every request and int32"),
    ],
)
def test_types_that_cannot_be_kept_are_told_before_the_model_is_loaded(tmp_path, types, words):
    """
    A wrong type is a ConfigError that names the mistake.
    """
    with pytest.raises(ConfigError, match=words) as caught:
        hooked(tmp_path, lambda _, rows: None, types)
    assert "request_metadata_types" == caught.value.field


def test_settings_without_effect_are_refused(tmp_path):
    """
    A hook that is no function or that no runner of ours calls, and types that no hook reads, are
    told.
    """
    with pytest.raises(ConfigError, match="must be a function of logits and rows, got 3"):
        hooked(tmp_path, 3)
    with pytest.raises(ConfigError, match="no effect without a logits_hook"):
        hooked(tmp_path, None, [STEER])
    with pytest.raises(ConfigError, match="no effect with a backend of your own"):
        engine_and_runner(logits_hook=lambda _, rows: None)


def test_an_error_of_the_hook_comes_out_of_the_step_and_others_are_served_later(model_dir):
    """
    A step raises what its hook raises, as it is; the engine serves on.
    """
    errors = [ArithmeticError("no luck")]

    def fail_once(_, rows):
        if errors:
            raise errors.pop()

    engine = hooked(model_dir, fail_once)
    engine.submit_request([5, 6], GenerationParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(ArithmeticError, match="no luck"):
        engine.run()
    (request,) = engine.run()
    assert FinishReason.MAX_TOKENS == request.finish_reason
