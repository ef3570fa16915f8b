"""The embedded engine computes the model's own tokens, however the work is cut, mixed or redone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from scheduler_svc.core.request.options import CoreOptions
from tandem.engine_config import EngineConfig
from tandem_embedded import CompletedRequest, InferenceEngine
from tests.model_zoo import FAMILIES
from tests.threads import NUM_THREADS
from tests.truth.equality import Comparison
from tests.truth.requests import GREEDY, NEIGHBOURS, OUTPUT_LEN, TARGETS, TruthRequest

BLOCK_SIZES = (1, 7, 16, 32)
CHUNK_TOKENS = 11
PREEMPT_AFTER = 20
"""Number of output tokens after which the target is preempted."""


def build_engine(model_dir: Path, block_size: int, *, chunked: bool) -> InferenceEngine:
    config = EngineConfig(
        block_size=block_size,
        max_num_blocks=1 + 2048 // block_size,
        max_batch_size=10,
        max_model_len=256,
        max_total_tokens=CHUNK_TOKENS if chunked else 2048,
        memory_threshold=1.0,
    )
    # Without prefix caching, so that a preempted request is really computed again.
    return InferenceEngine(
        config,
        model_dir,
        dtype="float32",
        num_threads=NUM_THREADS,
        collect_margins=True,
        options=CoreOptions(prefix_caching=False),
    )


def serve(
    engine: InferenceEngine,
    target: TruthRequest,
    *,
    neighbours: tuple[TruthRequest, ...] = (),
    preempted: bool = False,
) -> CompletedRequest:
    """
    Serve a target that is submitted among neighbours; preempt it in the middle of its output if
    asked.
    """
    (found,) = serve_targets(engine, [target], neighbours=neighbours, preempted=preempted)
    return found


def serve_targets(
    engine: InferenceEngine,
    targets: Sequence[TruthRequest],
    *,
    neighbours: tuple[TruthRequest, ...] = (),
    preempted: bool = False,
) -> list[CompletedRequest]:
    """
    Serve targets together, submitted among neighbours; preempt each in the middle of its output if
    asked.
    """
    for neighbour in neighbours[::2]:
        engine.submit_request(list(neighbour.prompt), neighbour.params)
    ids = [engine.submit_request(list(target.prompt), target.params) for target in targets]
    for neighbour in neighbours[1::2]:
        engine.submit_request(list(neighbour.prompt), neighbour.params)
    finished: dict[int, CompletedRequest] = {}
    to_preempt = set(ids) if preempted else set()
    while engine.has_pending_work():
        for target_id in sorted(to_preempt):
            if len(engine.output_tokens(target_id)) >= PREEMPT_AFTER:
                engine.preempt(target_id)
                to_preempt.remove(target_id)
        finished |= {request.request_id: request for request in engine.step()}
    assert not to_preempt
    assert all(request.success for request in finished.values())
    return [finished[target_id] for target_id in ids]


def hugging_face_greedy(model_dir: Path) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt = torch.tensor([GREEDY.prompt])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=OUTPUT_LEN,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(GREEDY.prompt) :].tolist()


EVERYDAY = "llama_gqa_llama3_rope"
"""The family of which not all tests are slow."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name != EVERYDAY))
        for name in sorted(FAMILIES)
    ],
)
def model_dir(request, tmp_path_factory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def references(model_dir) -> dict[str, CompletedRequest]:
    """Return the completions of both targets, served alone in one chunk with block size 16."""
    engine = build_engine(model_dir, 16, chunked=False)
    return {name: serve(engine, target) for name, target in TARGETS.items()}


class TestAgainstHuggingFace:
    def test_greedy_tokens_are_those_of_transformers(self, model_dir, references):
        """
        Greedy tokens of a request served alone are those that `transformers` generates.
        """
        comparison = Comparison()
        reference = references["greedy"]
        comparison.check(
            hugging_face_greedy(model_dir),
            reference.output_tokens,
            reference.margins,
            "transformers",
        )
        comparison.assert_not_vacuous()


class TestEveryWayOfServing:
    def test_hardest_way_gives_equal_tokens(self, model_dir, references):
        """
        Odd blocks, small chunks, neighbours and a preemption in the middle, all at once, change no
        token, greedy or seeded.
        """
        comparison = Comparison()
        engine = build_engine(model_dir, 7, chunked=True)
        for name, target in TARGETS.items():
            found = serve(engine, target, neighbours=NEIGHBOURS, preempted=True)
            reference = references[name]
            comparison.check(reference.output_tokens, found.output_tokens, reference.margins, name)
        comparison.assert_not_vacuous()

    @pytest.mark.slow
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    def test_every_way_gives_equal_tokens(self, model_dir, references, block_size):
        """
        Every combination of block size, chunks, neighbours and preemption changes no token: of a
        target alone, and of both targets among the neighbours.
        """
        comparison = Comparison()
        for chunked, preempted in itertools.product((False, True), (False, True)):
            engine = build_engine(model_dir, block_size, chunked=chunked)
            targets = list(TARGETS.values())
            found = {
                "alone": [serve(engine, target, preempted=preempted) for target in targets],
                "mixed": serve_targets(engine, targets, neighbours=NEIGHBOURS, preempted=preempted),
            }
            for way, completed in found.items():
                for name, one in zip(TARGETS, completed, strict=True):
                    own = references[name]
                    what = f"{name} {way} {chunked=} {preempted=}"
                    comparison.check(own.output_tokens, one.output_tokens, own.margins, what)
            assert 0 == engine.get_memory_stats().used_blocks
        comparison.assert_not_vacuous()
