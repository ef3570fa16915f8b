"""Whole prefills: without chunked prefill every prompt is computed in one step."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.core.request.options import CoreOptions, StepPriority
from scheduler_svc.core.scheduler import Scheduler
from tandem.errors import InvalidConfig
from tests.scheduler_svc.core.harness import Rig, geometry_of, small_config

WHOLE = CoreOptions(chunked_prefill=False)
CONFIG = small_config(
    max_num_blocks=64, max_batch_size=8, max_model_len=40, max_total_tokens=40
)  # fmt: skip


def rig_with(lengths, *, options: CoreOptions = WHOLE, config=CONFIG, max_tokens: int = 6) -> Rig:
    rig = Rig(config, options=options)
    for length in lengths:
        rig.submit(prompt_len=length, max_tokens=max_tokens)
    return rig


def cut_prompts(rig: Rig) -> int:
    """Return the number of rows that compute a part of a prompt and do not reach its end."""
    return sum(int((batch.row_flags == 0).sum()) for batch in rig.batches)


class TestWholePrefills:
    @pytest.mark.parametrize("priority", StepPriority)
    @pytest.mark.parametrize("seed", range(4))
    def test_no_prompt_is_cut_and_all_finish(self, priority, seed):
        """
        Each prompt, up to the longest that fits, is computed in one step with decodes in between,
        and every request has its tokens.
        """
        source = random.Random(seed)
        lengths = [source.choice([1, 7, 20, 34]) for _ in range(20)]
        options = CoreOptions(chunked_prefill=False, step_priority=priority)
        rig = rig_with(lengths, options=options)
        rig.run()
        assert 0 == cut_prompts(rig)
        assert [rig.expected(handle) for handle in range(20)] == [
            rig.outputs[handle] for handle in range(20)
        ]

    def test_with_chunked_prefill_they_are_cut(self):
        """
        The same prompts are cut where chunked prefill is allowed.
        """
        rig = rig_with([34, 34, 34], options=CoreOptions())
        rig.run()
        assert cut_prompts(rig) > 0

    def test_nobody_overtakes_a_prompt_that_waits_for_room(self):
        """
        A prompt that needs the whole step gets one, though short ones come all the time.
        """
        rig = rig_with([3], max_tokens=12)
        rig.step()
        long = rig.submit(prompt_len=39, max_tokens=1)
        for _ in range(30):
            rig.submit(prompt_len=3, max_tokens=12)
        for _ in range(16):
            rig.step()
        assert rig.expected(long) == rig.outputs[long]
        rig.run()
        assert 0 == cut_prompts(rig)

    def test_prompts_are_cut_once_memory_ran_out(self):
        """
        A request finishes all the same where the executor has no memory for its whole prompt.
        """
        rig = rig_with([34, 34])
        rig.fits = lambda batch: batch.num_tokens <= 20
        rig.run()
        assert cut_prompts(rig) > 0
        assert [rig.expected(handle) for handle in range(2)] == [
            rig.outputs[handle] for handle in range(2)
        ]


class TestRefusals:
    @pytest.mark.parametrize(
        ("values", "name"),
        [
            ({"chunked_prefill_size": 8}, "chunked_prefill_size"),
            ({"long_prefill_threshold": 8}, "long_prefill_threshold"),
            ({"max_prefill_share": 0.5}, "max_prefill_share"),
        ],
    )
    def test_what_cuts_prompts_is_refused_beside_it(self, values, name):
        """
        An option that cuts prompts is refused without chunked prefill.
        """
        with pytest.raises(InvalidConfig, match=name):
            CoreOptions(chunked_prefill=False, **values).validate()

    def test_steps_too_small_for_the_longest_sequence_are_refused(self):
        """
        A max_total_tokens below max_model_len is refused, as no step could hold the longest
        prompts.
        """
        config = small_config(max_model_len=40, max_total_tokens=39)
        with pytest.raises(InvalidConfig, match="max_total_tokens is 39, max_model_len 40"):
            Scheduler(config, geometry_of(config), WHOLE)
        WHOLE.check_limits(max_total_tokens=40, max_model_len=40)

    @pytest.mark.parametrize("share", [0.0, 1.01, -0.5])
    def test_share_of_a_step_that_is_none_is_refused(self, share):
        """
        Prompts take a share over 0 and at most 1 of a step.
        """
        with pytest.raises(InvalidConfig, match="max_prefill_share"):
            CoreOptions(max_prefill_share=share).validate()
        CoreOptions(max_prefill_share=1.0).validate()
