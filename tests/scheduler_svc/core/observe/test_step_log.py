"""Log lines of steps: their texts, and their numbers, which are those of the moment."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from scheduler_svc.core.observe.step_log import (
    StepLog,
    StepSnapshot,
    decode_line,
    preemption_line,
    prefill_line,
    retraction_line,
)
from scheduler_svc.core.request.options import CoreOptions
from tests.scheduler_svc.core.harness import Rig, small_config

DECODE = re.compile(
    r"^Decode batch\. #running-req: (\d+), #token: (\d+), token usage: (\d\.\d\d), "
    r"gen throughput \(token/s\): (\d+\.\d\d), #queue-req: (\d+)$"
)
PREFILL = re.compile(
    r"^Prefill batch\. #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), "
    r"cache hit rate: (\d+\.\d\d)%, token usage: (\d\.\d\d), #running-req: (\d+), "
    r"#queue-req: (\d+)$"
)


def found(rig: Rig, pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    matches = [pattern.match(line.text) for line in rig.log_lines]
    return [match.groups() for match in matches if match]


class TestTexts:
    def test_the_decode_line_is_that_of_the_source(self):
        """
        The line is byte for byte the one operators of SGLang know.
        """
        snapshot = StepSnapshot(
            num_running=233, num_queued=317, used_blocks=370959, num_blocks=452389, block_size=1
        )
        assert (
            "Decode batch. #running-req: 233, #token: 370959, token usage: 0.82, "
            "gen throughput (token/s): 4594.01, #queue-req: 317"
        ) == decode_line(snapshot, 4594.0123).text
        assert {
            "running_requests": 233,
            "tokens": 370959,
            "token_usage": 0.82,
            "tokens_per_s": 4594.01,
            "waiting_requests": 317,
        } == decode_line(snapshot, 4594.0123).values

    def test_the_prefill_line(self):
        """
        New sequences are not counted among the running ones.
        """
        snapshot = StepSnapshot(
            num_running=12, num_queued=3, used_blocks=50, num_blocks=200, block_size=16
        )
        line = prefill_line(snapshot, num_seqs=2, num_new=700, num_cached=64, hit_rate=0.0838)
        assert (
            "Prefill batch. #new-seq: 2, #new-token: 700, #cached-token: 64, "
            "cache hit rate: 8.38%, token usage: 0.25, #running-req: 10, #queue-req: 3"
        ) == line.text
        assert not line.is_warning
        assert ("prefill_batch", 700, 64) == (
            line.event,
            line.values["new_tokens"],
            line.values["cached_tokens"],
        )

    def test_the_retraction_line_is_that_of_the_source(self):
        """
        Ratios have four decimals.
        """
        line = retraction_line(1, 0.99981, 1.0)
        assert (
            "decode out of memory happened, #retracted_reqs: 1, #new_token_ratio: 0.9998 -> 1.0000"
        ) == line.text
        assert line.is_warning

    @pytest.mark.parametrize(
        ("count", "warns"),
        [(1, True), (2, False), (49, False), (50, True), (51, False), (100, True), (5000, True)],
    )
    def test_the_first_and_every_fiftieth_preemption_warn(self, count, warns):
        """
        The first preemption and then one in fifty warns, so that a crowded log can still be read.
        """
        line = preemption_line({"request_id": "r1"}, "recompute", count)
        assert warns is (line is not None)

    def test_the_preemption_warning_holds_the_sentence_of_the_source(self):
        """
        The warning says what happens, what it costs, what to change and how often it happened.
        """
        text = preemption_line({"request_id": "r1"}, "recompute", 50).text
        assert (
            "there is not enough KV cache space. This can affect the end-to-end performance."
        ) in text
        for setting in ("gpu_memory_utilization", "max_batch_size", "schedule_conservativeness"):
            assert setting in text
        assert text.endswith("total_num_cumulative_preemption=50")


class TestDecodeLines:
    @pytest.mark.parametrize("delay", [1, 4])
    def test_every_fortieth_decode_pass_has_one(self, delay):
        """
        Every fortieth decode pass over all requests has a line; batches without a decode are no
        pass.
        """
        rig = Rig(small_config(max_num_blocks=256), delay=delay)
        num_passes = 0
        for _ in range(5):
            rig.submit(prompt_len=20, max_tokens=30)
            rig.submit(prompt_len=5, max_tokens=12)
            while rig.core.has_pending_work():
                before = len(found(rig, DECODE))
                batch = rig.step()
                has_decode = batch is not None and any(
                    start >= len(rig.submitted[int(handle)].prompt)
                    for start, handle in zip(
                        batch.row_start,
                        rig.core._replica.slots.admitted.handle[batch.row_slot],
                        strict=True,
                    )
                )
                num_passes += has_decode
                is_due = has_decode and num_passes % 40 == 0
                assert is_due is (len(found(rig, DECODE)) > before)
        assert len(found(rig, DECODE)) == num_passes // 40 >= 3

    def test_its_numbers_are_those_of_the_moment(self):
        """
        The line has running and waiting requests, tokens in blocks that requests hold, and their
        share of all.
        """
        rig = Rig(
            small_config(max_num_blocks=40, max_batch_size=3, max_total_tokens=32, max_num_seqs=64),
            options=CoreOptions(schedule_conservativeness=0.0),
        )
        rig.submit(prompt_len=40, max_tokens=2)
        rig.run()
        assert rig.core.stats().cached_blocks > 0
        for _ in range(8):
            rig.submit(prompt_len=6, max_tokens=50)
        num_seen = 0
        while rig.core.has_pending_work():
            rig.plan()
            if len(lines := found(rig, DECODE)) > num_seen:
                num_seen = len(lines)
                stats = rig.core.stats()
                running, tokens, usage, _, queued = lines[-1]
                assert stats.running_requests == int(running)
                assert stats.waiting_requests == int(queued)
                used = stats.total_blocks - stats.free_blocks - stats.cached_blocks
                assert used * 4 == int(tokens)
                assert f"{used / 40:.2f}" == usage
            rig.now += 1
            while rig.pending:
                rig.deliver()
        assert num_seen >= 2

    def test_throughput_is_tokens_seen_since_the_line_before(self):
        """
        Throughput is the output tokens between two lines, divided by the seconds between them.
        """
        rig = Rig(small_config(max_num_blocks=128, max_model_len=120))
        for _ in range(3):
            rig.submit(prompt_len=4, max_tokens=100)
        marks = [(rig.now, 0)]
        while rig.core.has_pending_work():
            before, tokens = len(found(rig, DECODE)), rig.core.stats().output_tokens
            rig.plan()
            if len(found(rig, DECODE)) > before:
                marks.append((rig.now, tokens))
            rig.now += 0.25
            while rig.pending:
                rig.deliver()
        expected = [
            f"{(tokens - tokens_before) / (now - before_s):.2f}"
            for (before_s, tokens_before), (now, tokens) in pairwise(marks)
        ]
        assert expected == [line[3] for line in found(rig, DECODE)]
        assert 2 == len(expected)

    def test_idle_time_does_not_count(self):
        """
        Throughput is counted from the first request on after the core was idle.
        """
        rig = Rig(small_config(max_num_blocks=64))
        rig.submit(prompt_len=4, max_tokens=10)
        rig.run()
        rig.now += 1000.0
        began_s, tokens = rig.now, rig.core.stats().output_tokens
        rig.submit(prompt_len=4, max_tokens=60)
        while not found(rig, DECODE):
            seen = rig.core.stats().output_tokens
            rig.step()
        expected = (seen - tokens) / (rig.now - began_s)
        assert f"{expected:.2f}" == found(rig, DECODE)[0][3]

    @pytest.mark.parametrize(("passed_s", "rate"), [(0.0, "0.00"), (0.5, "6.00"), (1.0, "3.00")])
    def test_throughput_of_no_time_is_none(self, passed_s, rate):
        """
        A line is a rate also after less than a second, and 0 where no time has passed at all.
        """
        log = StepLog()
        log.wake(10.0, 5)
        snapshot = StepSnapshot(
            num_running=1, num_queued=0, used_blocks=1, num_blocks=9, block_size=4
        )
        (_, _, _, throughput, _) = DECODE.match(
            log.decode_line(snapshot, 8, 10.0 + passed_s).text
        ).groups()
        assert rate == throughput


class TestPrefillLines:
    def test_each_batch_with_prompts_has_one(self):
        """
        The line has the sequences and tokens of prompts in the batch, the other running requests,
        and the waiting ones.
        """
        rig = Rig(small_config(max_batch_size=3, max_num_blocks=64))
        rig.submit(prompt_len=4, max_tokens=30)
        rig.step()
        for _ in range(3):
            rig.submit(prompt_len=12, max_tokens=4)
        num_seen = len(found(rig, PREFILL))
        assert 1 == num_seen
        while rig.core.has_pending_work():
            slots, admitted = rig.core._replica.slots, rig.core._replica.slots.admitted.known_len
            batch = rig.plan()
            is_prompt = [] if batch is None else batch.row_start < admitted[batch.row_slot]
            lines = found(rig, PREFILL)
            assert (len(lines) > num_seen) is bool(sum(is_prompt))
            if len(lines) > num_seen:
                num_seen = len(lines)
                seqs, tokens, _, _, usage, running, queued = lines[-1]
                assert sum(is_prompt) == int(seqs)
                assert int(batch.row_num_tokens[is_prompt].sum()) == int(tokens)
                assert slots.num_running - sum(is_prompt) == int(running)
                assert rig.core.stats().waiting_requests == int(queued)
                assert f"{rig.core.stats().used_blocks / 64:.2f}" == usage
            rig.now += 1
            while rig.pending:
                rig.deliver()

    def test_cached_tokens_and_hit_rate_are_those_of_the_prefix_cache(self):
        """
        The second of two equal prompts is mostly cached; the rate is over all prompts so far.
        """
        rig = Rig(small_config(max_total_tokens=64))
        rig.submit(prompt_len=16, max_tokens=2)
        rig.run()
        rig.submit(prompt=rig.submitted[0].prompt, max_tokens=2)
        rig.run()
        first, second = found(rig, PREFILL)
        assert ("1", "16", "0", "0.00") == first[:4]
        cached = rig.ended[1].num_cached_tokens
        assert (str(16 - cached), str(cached)) == second[1:3]
        assert f"{100 * cached / 32:.2f}" == second[3]
        assert cached >= 12
