"""
Everything that can happen to a core, as methods that draw what they need.

The driver of a world gives it a `choose` that takes one of several values: hypothesis, so that
failures shrink, or a seeded generator, so that long histories are cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core.faults.out_of_memory import FAILS_AT
from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.options import (
    CoreOptions,
    Eviction,
    OnPressure,
    Overlength,
    PreemptionMode,
    SchedulePolicy,
    StepPriority,
    VictimRule,
)
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.state.suspects import BROKEN_AT
from tandem.errors import (
    ExecutorLost,
    InvalidLogits,
    OutOfMemory,
    PoisonRequest,
    QueueFull,
    TandemError,
)
from tandem.link.commands import KvMode
from tests.scheduler_svc.core.fake_executor import expected_outputs
from tests.scheduler_svc.core.harness import GREEDY, Rig, context_of, geometry_of, small_config

Choose = Callable[[list], Any]

ENDS = [*[frozenset()] * 5, frozenset({3}), frozenset(range(10))]
ALL_EVENTS = {
    "track_request_events": True, "track_token_events": True, "track_paused_events": True
}  # fmt: skip


def draw_options(choose: Choose) -> CoreOptions:
    """Return any combination of what an operator can choose, the defaults more often."""
    return CoreOptions(
        schedule_policy=choose(list(SchedulePolicy)),
        ageing_s=choose([5.0, 1.0, 50.0]),
        priority_preemption=choose([False, True]),
        prefix_caching=choose([True, True, False]),
        eviction=choose(list(Eviction)),
        on_pressure=choose([OnPressure.QUEUE, OnPressure.QUEUE, OnPressure.REFUSE]),
        overlength=choose(list(Overlength)),
        max_queued_requests=choose([None, None, 5]),
        max_queued_tokens=choose([None, None, 60]),
        max_tenant_requests=choose([None, None, 4]),
        max_tenant_queued_tokens=choose([None, None, 40]),
        tenant_tokens_per_minute=choose([None, None, 80]),
        schedule_conservativeness=choose([0.0, 0.0, 0.0, 0.3, 1.0, 1.3]),
        victim_rule=choose(list(VictimRule)),
        paused_budget_blocks=choose([0, 2, 6]),
        preemption_mode=choose(list(PreemptionMode)),
        step_priority=choose(list(StepPriority)),
        chunked_prefill_size=choose([None, None, 1, 3, 8]),
        long_prefill_threshold=choose([None, None, 2, 6]),
        max_prefill_share=choose([1.0, 1.0, 0.5, 0.1]),
        window=choose([2, 1, 4, 8]),
        run_ahead=choose([4, 1, 16]),
        **choose([{}, ALL_EVENTS, {"track_request_events": True}]),
    )


class CoreWorld:
    """One core, its executor and its clients; see the module."""

    def __init__(
        self,
        choose: Choose,
        options: CoreOptions | None = None,
        *,
        num_stages: int = 1,
        room: int = 1,
    ) -> None:
        """
        Args:
            choose: See the module.
            options: What the operator chose; None: any.
            num_stages: Pipeline stages of the executor.
            room: For how many times as many requests there are rows and blocks.
        """
        num_blocks, block_size = room * choose([8, 12, 24]), choose([4, 1, 7])
        max_batch_size = room * choose([4, 2])
        self.config = small_config(
            block_size=block_size,
            max_num_blocks=num_blocks,
            max_batch_size=max_batch_size,
            max_total_tokens=max(choose([7, 4, 32]), max_batch_size),
            max_model_len=max(block_size, min(48, num_blocks * block_size)),
            memory_threshold=choose([1.0, 1.0, 0.6]),
            max_num_seqs=12 * room,
        )
        options = draw_options(choose) if options is None else options
        num_slots = self.config.max_batch_size + choose([0, 3])
        num_host_blocks = choose([0, 4, 32])
        geometry = geometry_of(self.config, num_slots, num_host_blocks, num_stages)
        most_tokens = min(geometry.max_total_tokens, choose([32, 32, 32, 2]))
        self.geometry = replace(geometry, max_total_tokens=most_tokens)
        self.delay = choose([2, 1, 4, 8])
        self.rig = Rig(self.config, delay=self.delay, options=options, geometry=self.geometry)
        self.rig.usual_step_s = choose([None, None, 0.001, 1.0])
        # A rig that does not keep to the depth must know which step an executor died in.
        self.rig.loses_results = choose([False, self.rig.usual_step_s is not None])
        self.options = options
        self.cut: set[int] = set()
        """Handles that were ended from outside, and those of rows that went bad."""
        self.may_fail: set[int] = set()
        """Handles that a smaller executor may not hold."""
        self.has_died: dict[str, bool] = {}
        """Boot ids of executors that fell silent, each with True when it had died."""

    def submit(self, choose: Choose) -> None:
        """Submit some requests together; a refused one is typed and leaves no trace."""
        max_tokens = choose([12, 1, 4, 20, 20, 28])
        lives_s = choose([*[None] * 8, 3, 20])
        fields = {
            "prompt": self._draw_prompt(choose),
            "eos_token_ids": choose(ENDS),
            "stop_token_ids": choose(ENDS),
            "deadline_s": None if lives_s is None else self.rig.now + lives_s,
            "num_choices": choose([1, 1, 1, 2, 3]),
            "priority": choose([0, 0, 0, 1, -3]),
            "tenant": choose(["", "blue", "red"]),
            "queue_limit_s": choose([*[None] * 6, 4.0]),
            "cache_salt": choose([b"", b"", b"", b"salt"]),
        }
        fields |= self._draw_prior_outputs(choose, fields, max_tokens)
        for _ in range(choose([1, 2, 4, 4])):
            before = self.rig.num_handles
            with suppress(TandemError):
                told = {
                    "logprobs": (None, None, 0, 2)[before % 4],
                    "prompt_logprobs": (None, None, 1)[before % 3],
                }
                only_scores = before % 6 == 2 and not fields.get("prior_outputs")
                fields["num_choices"] = 1 if only_scores else fields["num_choices"]
                self.rig.submit(
                    max_tokens=0 if only_scores else max_tokens,
                    sampling=replace(GREEDY, **told),
                    **fields,
                )
                self.rig.collect()
                if lives_s is not None:
                    self.cut.update(range(before, self.rig.num_handles))

    def _draw_prior_outputs(self, choose: Choose, fields: dict[str, Any], max_tokens: int):
        """Draw prior outputs, from a former life of the same prompt, or none."""
        prompt, num_choices = fields["prompt"], fields["num_choices"]
        limits = self.rig.core.limits
        fits = len(prompt) + max_tokens <= min(limits.max_model_len, int(
            limits.memory_threshold * limits.num_blocks) * limits.block_size)  # fmt: skip
        if not fits or choose([False, False, True]):
            return {}
        ends = fields["eos_token_ids"] | fields["stop_token_ids"]
        prior = []
        for choice in range(num_choices):
            count = min(choose([0, 1, 3, 9, 30]), max_tokens)
            prior.append(np.array(expected_outputs(prompt, count, ends, choice=choice), np.int32))
        finished = frozenset(range(choose(list(range(num_choices)))))
        return {"prior_outputs": tuple(prior), "finished_choices": finished}

    def _draw_prompt(self, choose: Choose):
        """Draw a prompt of its own, one of a family, or a conversation that goes on."""
        length, kind = choose([13, 1, 2, 3, 4, 5, 8, 16, 30]), choose([0, 1, 2, 3])
        if kind == 0 and self.rig.outputs:
            handle = choose(sorted(self.rig.outputs))
            past = [*self.rig.submitted[handle].prompt.tolist(), *self.rig.outputs[handle]]
            return np.array([*past, choose([1, 2])], np.int32)
        family = len(self.rig.submitted) if kind == 1 else choose([1000, 1001])
        prompt = (np.arange(length, dtype=np.int32) * 7 + family * 13) % 50
        if kind == 2:
            prompt[-1] = len(self.rig.submitted) % 50
        return prompt

    def step(self, choose: Choose) -> None:
        """Let time pass."""
        for _ in range(choose([5, 1, 2, 12, 20])):
            self.rig.step()

    def plan_ahead(self, _choose: Choose) -> None:
        """Send a batch out without a result coming in."""
        if len(self.rig.pending) < 8:
            self.rig.plan()

    def end_request(self, choose: Choose) -> None:
        """End a request from outside, with all its choices."""
        if live := self.live_handles():
            ended = self.rig.submitted[choose(live)]
            for handle, new in self.rig.submitted.items():
                if new.request_id == ended.request_id and handle in live:
                    self.cut.add(handle)
            reason = choose([FinishReason.CANCELLED, FinishReason.SUPERSEDED])
            self.rig.core.end_request(ended.request_id, reason, self.rig.now, tenant=ended.tenant)
            self.rig.collect()

    def end_handle(self, choose: Choose) -> None:
        """End one choice by a stop string found in its text."""
        if live := self.live_handles():
            handle = choose(live)
            self.cut.add(handle)
            num_outputs = len(self.rig.outputs.get(handle, ()))
            self.rig.core.end_handle(handle, FinishReason.STOP_STRING, self.rig.now, num_outputs)
            self.rig.collect()
            assert num_outputs == self.rig.ended[handle].num_output_tokens

    def poison(self, choose: Choose) -> None:
        """Make the model produce NaN for a row from now on, or for the next one from its start."""
        slots = self.rig.core._replica.slots
        if choose([True, False]):
            self.rig.poisons_next = True
        elif slots.running.any():
            slot = choose(slots.running.nonzero()[0].tolist())
            self.rig.poisoned.add(int(slots.admitted.handle[slot]))
            self.rig.executor.poisoned.add((slot, int(slots.generation[slot])))

    def preempt(self, choose: Choose) -> None:
        """Preempt a request if it runs: it loses its slot, and nothing else."""
        if live := self.live_handles():
            new = self.rig.submitted[choose(live)]
            self.rig.core.preempt(new.request_id, new.tenant)
            self.rig.check()

    def flush_prefix_cache(self, _choose: Choose) -> None:
        """Forget the prefixes computed so far; requests that share them go on."""
        pool = self.rig.core._replica.kv.pool
        num_free = pool.num_free
        num_flushed = self.rig.core.flush_prefix_cache()
        assert num_flushed == pool.num_free - num_free
        assert 0 == pool.num_cached
        self.rig.check()

    def suspend(self, choose: Choose) -> None:
        """Make the executor give its memory back, before or after what is under way."""
        self.rig.core.suspend(choose(list(KvMode)), self.rig.now)
        self.rig.check()

    def resume(self, _choose: Choose) -> None:
        """End a suspension, if there is one."""
        self.rig.core.resume()

    def lose_executor(self, choose: Choose) -> None:
        """Let the executor die, perhaps in a step in flight."""
        self.rig.lose_executor(choose([0, None, 0, 1, 3]))

    def lose_sight(self, choose: Choose) -> None:
        """Let an executor fall silent; then it or another one is seen, alive or dead."""
        boot_id, died_in = choose(["boot-1", "boot-2"]), choose([0, 0, 1])
        # It was attached, so it was seen alive, and did not die when it fell silent before.
        self.rig.core.executor_seen(boot_id, self.rig.now, died=False)
        self.has_died[boot_id] = choose([False, True])
        if self.has_died[boot_id]:
            self.rig.deaths.note(self.rig.core, died_in, self.rig.owners)
        self.rig.lose_executor(died_in, may_live=boot_id)
        seen = choose(["boot-1", "boot-2"])
        self.rig.core.executor_seen(seen, self.rig.now, died=self.has_died.get(seen, False))
        self.rig.collect()

    def run_out_of_memory(self, choose: Choose) -> None:
        """
        Let the executor run out of memory in a step in flight, or from now on for steps with so
        much context, or give it memory for all steps again.
        """
        most = choose([None, None, 24, 40])
        self.rig.fits = lambda batch: most is None or context_of(batch) <= most
        if choose([True, False]):
            self.rig.lose_executor(choose([0, 1]), out_of_memory=True)

    def plant_killer(self, choose: Choose) -> None:
        """Let executors die from now on when they compute a certain token of some request."""
        if live := self.live_handles():
            handle = choose(live)
            prompt_len = len(self.rig.submitted[handle].prompt)
            self.rig.deaths.kills_at[handle] = choose([prompt_len - 1, 0, prompt_len + 4])

    def change_executor(self, choose: Choose) -> None:
        """Let another executor take over, with more memory or less."""
        geometry = replace(
            self.geometry,
            num_blocks=choose([self.geometry.num_blocks, 6, 16]),
            max_model_len=choose([self.geometry.max_model_len, 20]),
        )
        self.may_fail.update(self.live_handles())
        self.rig.use_geometry(geometry)

    def fail_all(self, choose: Choose) -> None:
        """Fail all requests, once in a while."""
        if choose([False, False, True]):
            self.cut.update(self.live_handles())
            self.rig.core.fail_all(InvalidLogits("NaN"), self.rig.now)
            self.rig.collect()

    def live_handles(self) -> list[int]:
        """Return the handles of all requests in the system."""
        return sorted(self.rig.core._cell.requests._by_handle)

    def check_outputs(self) -> None:
        """Check that the outputs so far are a prefix of what unlimited memory would give."""
        for handle, outputs in self.rig.outputs.items():
            assert self.rig.expected(handle)[: len(outputs)] == outputs, "a wrong token"
            told = self.rig.logprobs[handle]
            assert self.rig.expected_logprobs(handle) == told, "a token without what was asked"
        for handle in self.rig.submitted:
            scores, expected = self.rig.scores[handle], self.rig.expected_scores(handle)
            assert expected[: len(scores)] == scores, "a wrong score of a prompt token"
            if len(self.rig.outputs[handle]) > self.rig.num_prior_of(handle):
                assert expected == scores, "an output before the scores of the prompt"

    def finish(self) -> None:
        """Run to the end; check that all is finished, with all tokens there and all blocks back."""
        self.rig.core.resume()
        self.rig.run()
        self.check_outputs()
        for handle in self.rig.submitted:
            assert (handle in self.rig.ended) != (handle in self.rig.failed)
            failure = self.rig.failed.get(handle)
            if failure is not None and isinstance(failure.error, OutOfMemory):
                assert self.rig.num_alone[handle] >= FAILS_AT
            elif failure is not None and isinstance(failure.error, PoisonRequest | ExecutorLost):
                self._check_blamed(handle, failure.error)
            elif failure is not None and isinstance(failure.error, QueueFull):
                # It waited past its limit, or gave its place to another tenant's.
                num_prior = self.rig.num_prior_of(handle)
                assert num_prior == len(self.rig.outputs.get(handle, ())), "it ran"
            elif handle not in self.cut | self.may_fail | self.rig.poisoned:
                self._check_end(handle)
        self._check_stats()
        if self.rig.core._cell.telemetry.recorder is not None:
            self._check_events()

    def _check_blamed(self, handle: int, error: TandemError) -> None:
        """Check that a request that fails for deaths died alone, twice if it fails as poison."""
        deaths = self.rig.deaths
        if isinstance(error, PoisonRequest):
            assert deaths.may_be_poison(handle), "it did not die alone twice"
        else:
            assert handle in deaths.died_alone
            assert len(deaths.died_alone) >= BROKEN_AT

    def _check_end(self, handle: int) -> None:
        new, ended = self.rig.submitted[handle], self.rig.ended[handle]
        num_prior = self.rig.num_prior_of(handle)
        expected = self.rig.expected(handle)
        assert expected == self.rig.outputs[handle], "tokens are missing"
        assert len(expected) == ended.num_output_tokens
        assert len(new.prompt) == ended.num_prompt_tokens
        assert 0 <= ended.num_cached_tokens < len(new.prompt) + (num_prior > 0)
        assert 0 <= ended.queue_s <= ended.total_s
        assert (ended.first_token_s is None) == (num_prior == len(expected))
        if ended.first_token_s is not None:
            assert ended.queue_s <= ended.first_token_s <= ended.total_s
        reasons = {FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LIMIT}
        if not any(map(len, new.prior_outputs)):  # a choice may end at once with what it came with
            scores = self.rig.scores[handle]
            assert self.rig.expected_scores(handle) == scores, "scores are missing"
        if not expected:
            assert (0, FinishReason.MAX_TOKENS) == (new.max_tokens, ended.reason)
        elif expected[-1] in new.eos_token_ids:
            reasons = {FinishReason.EOS}
        elif expected[-1] in new.stop_token_ids:
            reasons = {FinishReason.STOP_TOKEN}
        assert ended.reason in reasons

    def _check_stats(self) -> None:
        """Check that the core counted what was seen from outside."""
        rig, stats = self.rig, self.rig.core.stats()
        assert len(rig.submitted) == stats.accepted_requests
        assert (len(rig.ended), len(rig.failed)) == (stats.finished_requests, stats.failed_requests)
        assert sum(map(len, rig.outputs.values())) == stats.output_tokens + rig.num_prior
        counters = rig.core._cell.telemetry.counters
        num_in = sum(len(batch.swap_in_block) for batch in rig.batches)
        num_out = sum(len(batch.swap_out_block) for batch in rig.batches)
        assert (num_in, num_out) == (
            counters.preemption.swapped_in_blocks,
            counters.preemption.swapped_out_blocks,
        )
        times = [times for times in rig.token_times.values() if times]
        waits = [t[0] - rig.submitted[h].arrival_s for h, t in rig.token_times.items() if t]
        gaps = [late - soon for one in times for soon, late in pairwise(one)]
        assert (len(waits), len(gaps)) == (stats.first_tokens, stats.next_tokens)
        assert sum(waits) == pytest.approx(stats.time_to_first_token_s)
        assert sum(gaps) == pytest.approx(stats.inter_token_s)
        histograms = rig.core.histograms()
        assert len(waits) == sum(histograms["time_to_first_token"].counts)
        assert len(gaps) == sum(histograms["inter_token_latency"].counts)

    def _check_events(self) -> None:
        """Check that each request's events tell its life: in time, a token each, and its end."""
        for request_id in {new.request_id for new in self.rig.submitted.values()}:
            events = self.rig.core.request_events(request_id)
            times = [event.time_s for event in events]
            assert times == sorted(times)
            for handle, new in self.rig.submitted.items():
                if new.request_id == request_id:
                    own = [e for e in events if e.choice == new.sampling.choice]
                    self._check_events_of(handle, own)

    def _check_events_of(self, handle: int, events) -> None:
        end = self.rig.ended.get(handle)
        kinds = [event.kind for event in events]
        assert EventKind.ADD is kinds[0]
        assert (EventKind.FAIL if end is None else EventKind.FINISH) is kinds[-1]
        tokens = [event.token_id for event in events if event.token_id is not None]
        new = self.rig.outputs[handle][self.rig.num_prior_of(handle) :]
        assert tokens == (new if self.options.track_token_events else [])
        if end is not None:
            assert end.first_token_s == events[-1].ttft_s
            lost = kinds.count(EventKind.RETRACT) + kinds.count(EventKind.EVICT)
            assert end.num_preemptions <= lost


EVERYTHING: dict[str, int] = {
    "submit": 8, "step": 16, "plan_ahead": 4, "end_request": 1, "end_handle": 1, "flush_prefix_cache": 1, "poison": 2,
    "preempt": 1, "suspend": 1, "resume": 3, "lose_executor": 1, "lose_sight": 1, "run_out_of_memory": 1, "change_executor": 1, "fail_all": 1,
    "plant_killer": 2,
}  # fmt: skip
"""Events that can happen, and their frequencies in a random walk, relative to each other."""
COMING_AND_GOING: dict[str, int] = {
    "submit": 8, "step": 16, "plan_ahead": 4, "end_request": 1, "end_handle": 4, "preempt": 2,
}  # fmt: skip
"""Events without faults, so that many requests run and lanes become uneven."""
