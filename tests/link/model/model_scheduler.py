"""A small scheduler for the link's model: it plans batches with bookkeeping of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tandem.link.batch import Admission, Batch
from tandem.link.commands import Command, KvMode, Resume, Suspend
from tandem.link.results import StepResult
from tandem.link.scheduler_end import SchedulerEnd
from tandem.link.slots.state_hash import StateHash, block_terms, generation_term, length_key
from tandem.sampling_params import SamplingParams
from tests.link.model.model_requests import ModelRequest, Place

SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=5)


@dataclass(frozen=True)
class Geometry:
    num_slots: int = 3
    max_blocks_per_slot: int = 10
    block_size: int = 2
    num_blocks: int = 16
    num_host_blocks: int = 6


@dataclass(eq=False)
class Row:
    """A slot in use: `num_known` counts the tokens with a value that the executor will have."""

    request: ModelRequest
    slot: int
    generation: int
    blocks: list[int]
    planned: int
    num_known: int
    doomed: bool = False


@dataclass
class Saved:
    """The KV of a preempted request's first positions in host blocks."""

    host_blocks: list[int]
    num_tokens: int


@dataclass
class Plan:
    """A batch under construction, column by column."""

    release: list[int] = field(default_factory=list)
    admits: list[Admission] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    appends: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)
    drawn: list[tuple[Row, int]] = field(default_factory=list)

    def batch(self) -> Batch:
        rows = np.array(self.rows, np.int32).reshape(-1, 4)
        appends = np.array(self.appends, np.int32).reshape(-1, 2)
        copies = np.array(self.copies, np.int32).reshape(-1, 2)
        swaps_out = np.array(self.swaps_out, np.int32).reshape(-1, 2)
        swaps_in = np.array(self.swaps_in, np.int32).reshape(-1, 2)
        return Batch(
            admits=tuple(self.admits),
            row_slot=rows[:, 0],
            row_start=rows[:, 1],
            row_num_tokens=rows[:, 2],
            row_flags=rows[:, 3].astype(np.uint8),
            append_slot=appends[:, 0],
            append_block=appends[:, 1],
            release_slot=np.array(self.release, np.int32),
            copy_source=copies[:, 0],
            copy_destination=copies[:, 1],
            swap_out_block=swaps_out[:, 0],
            swap_out_host=swaps_out[:, 1],
            swap_in_host=swaps_in[:, 0],
            swap_in_block=swaps_in[:, 1],
        )


class ModelScheduler:
    """Requests, slots and blocks of one scheduler; `end` is the code under test."""

    def __init__(self, name: str, end: SchedulerEnd, geometry: Geometry) -> None:
        self.name = name
        self.end = end
        self.geometry = geometry
        self.requests: list[ModelRequest] = []
        self.forget_executor()

    def forget_executor(self) -> None:
        """Forget every slot and block; requests keep their outputs and wait, in arrival order."""
        self.rows: dict[int, Row] = {}
        self.generations = [0] * self.geometry.num_slots
        self.free_blocks = list(range(1, self.geometry.num_blocks + 1))
        self.holders: Counter[int] = Counter()
        self.free_host_blocks = list(range(1, self.geometry.num_host_blocks + 1))
        self.saved: dict[ModelRequest, Saved] = {}
        self.in_flight: dict[int, list[tuple[Row, int]]] = {}
        self.suspended = False
        for request in self.requests:
            request.num_pending = 0
            if request.place is not Place.ENDED:
                request.place = Place.WAITING

    def submit(self, prompt: list[int], max_outputs: int, parent: ModelRequest | None) -> None:
        name = f"{self.name}{len(self.requests)}"
        self.requests.append(ModelRequest(name, prompt, max_outputs, parent))

    def preempt(self, row: Row) -> None:
        row.doomed = True

    def abort(self, request: ModelRequest) -> None:
        request.aborted = True
        request.place = Place.ENDED
        for row in self.rows.values():
            row.doomed = row.doomed or row.request is request

    def has_work(self) -> bool:
        live = any(request.place is not Place.ENDED for request in self.requests)
        return live or bool(self.rows) or self.suspended

    def plan(self, chunk: int, max_admits: int) -> tuple[Command, int] | None:
        """Make the next batch and the hash after it; None when there is nothing to do."""
        if self.suspended:
            return None
        plan = Plan()
        for request in [request for request in self.saved if request.place is Place.ENDED]:
            self.free_host_blocks += self.saved.pop(request).host_blocks
        for row in [row for row in self.rows.values() if row.doomed]:
            self._release(row, plan)
        written = {row.slot: row.planned for row in self.rows.values()}
        for row in list(self.rows.values()):
            self._extend(row, chunk, plan)
        waiting = [r for r in self.requests if r.place is Place.WAITING]
        for request in waiting[:max_admits]:
            if not self._admit(request, chunk, written, plan):
                break
        self.free_host_blocks += [host for host, _ in plan.swaps_in]
        plan.rows.sort(key=lambda row: row[2] > 1)
        plan.drawn.sort(key=lambda drawn: [row[0] for row in plan.rows].index(drawn[0].slot))
        if not (plan.rows or plan.release):
            return None
        self.in_flight[self.end.last_sent_step_id + 1] = plan.drawn
        return plan.batch(), self.state_hash()

    def plan_suspension(self, mode: KvMode) -> tuple[Command, int] | None:
        """
        Plan a suspension; with rows in slots, RECOMPUTE first plans a batch that releases them all.
        """
        if self.suspended:
            return None
        if mode is KvMode.RECOMPUTE and self.rows:
            for row in self.rows.values():
                self.preempt(row)
            return self.plan(1, 0)
        self.suspended = True
        self.in_flight[self.end.last_sent_step_id + 1] = []
        return Suspend(kv_mode=mode), self.state_hash()

    def plan_resumption(self) -> tuple[Command, int]:
        self.suspended = False
        self.in_flight[self.end.last_sent_step_id + 1] = []
        return Resume(), self.state_hash()

    def apply(self, result: StepResult) -> None:
        """Take a result that the end let through, checking it against the step that was sent."""
        assert result.step_id in self.in_flight, "a result was let through that nobody waits for"
        drawn = self.in_flight.pop(result.step_id)
        expected = [(row.slot, row.generation, position) for row, position in drawn]
        found = zip(result.slot, result.generation, result.position, strict=True)
        assert expected == [tuple(int(x) for x in entry) for entry in found]
        for (row, position), token in zip(drawn, result.token.tolist(), strict=True):
            request = row.request
            request.num_pending -= 1
            if request.place is not Place.ENDED:
                request.take(position, token)
                if request.is_complete:
                    request.place = Place.ENDED
                    row.doomed = True
            if request.place is Place.DRAINING and request.num_pending == 0:
                request.place = Place.WAITING

    def snapshot(self) -> dict[int, tuple[int, int, tuple[int, ...]]]:
        """Return generation, planned length and blocks of every live slot."""
        return {
            slot: (row.generation, row.planned, tuple(row.blocks))
            for slot, row in self.rows.items()
        }

    def state_hash(self) -> int:
        fresh = StateHash()
        for slot, (generation, planned, blocks) in self.snapshot().items():
            fresh.add(generation_term(slot, generation))
            fresh.add(length_key(slot, generation) * planned)
            fresh.add(int(block_terms(slot, np.arange(len(blocks)), np.array(blocks)).sum()))
        return fresh.value

    def check(self) -> None:
        """
        Check the own bookkeeping: every block is free or held as often as block tables name it, and
        a request has at most one row.
        """
        held = Counter(block for row in self.rows.values() for block in row.blocks)
        assert held == +self.holders
        assert sorted([*self.free_blocks, *held]) == list(range(1, self.geometry.num_blocks + 1))
        saved = [host for saved in self.saved.values() for host in saved.host_blocks]
        num_host_blocks = self.geometry.num_host_blocks
        assert sorted([*self.free_host_blocks, *saved]) == list(range(1, num_host_blocks + 1))
        assert len({id(row.request) for row in self.rows.values()}) == len(self.rows)

    def _take_block(self) -> int:
        block = self.free_blocks.pop(0)
        self.holders[block] += 1
        return block

    def _release(self, row: Row, plan: Plan) -> None:
        plan.release.append(row.slot)
        del self.rows[row.slot]
        if row.request.place is Place.RUNNING:
            self._save(row, plan)
        for block in row.blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free_blocks.append(block)
        if row.request.place is Place.RUNNING:
            row.request.place = self._place_after_preemption(row.request)

    def _save(self, row: Row, plan: Plan) -> None:
        """
        Swap out the blocks that the row has computed, if host blocks have room for all of them.
        """
        count = -(-row.planned // self.geometry.block_size)
        if 0 < count <= len(self.free_host_blocks):
            hosts = [self.free_host_blocks.pop(0) for _ in range(count)]
            self.saved[row.request] = Saved(hosts, row.planned)
            plan.swaps_out += zip(row.blocks[:count], hosts, strict=True)

    def _place_after_preemption(self, request: ModelRequest) -> Place:
        return Place.DRAINING if request.num_pending else Place.WAITING

    def _extend(self, row: Row, chunk: int, plan: Plan) -> None:
        """
        Plan the next tokens of a running row; preempt the newest row if too few blocks are free.
        """
        request = row.request
        num_drawn = len(request.outputs) + request.num_pending
        if row.doomed or num_drawn >= request.max_outputs:
            return
        length = min(chunk, row.num_known - row.planned)
        num_missing = -(-(row.planned + length) // self.geometry.block_size) - len(row.blocks)
        if num_missing > len(self.free_blocks):
            self.preempt(list(self.rows.values())[-1])
            return
        for _ in range(num_missing):
            block = self._take_block()
            row.blocks.append(block)
            plan.appends.append((row.slot, block))
        self._plan_row(row, length, plan)

    def _plan_row(self, row: Row, length: int, plan: Plan) -> None:
        start = row.planned
        row.planned += length
        samples = row.planned == row.num_known
        plan.rows.append((row.slot, start, length, int(samples)))
        if samples:
            plan.drawn.append((row, row.num_known))
            row.num_known += 1
            row.request.num_pending += 1

    def _admit(
        self, request: ModelRequest, chunk: int, written: dict[int, int], plan: Plan
    ) -> bool:
        size = self.geometry.block_size
        free_slots = [s for s in range(self.geometry.num_slots) if s not in self.rows]
        tokens = request.tokens
        saved = self.saved.get(request)
        if saved is not None and {host for _, host in plan.swaps_out} & {*saved.host_blocks}:
            return False
        source, num_cached = self._cached(request, written)
        if saved is not None:
            source, num_cached = None, min(saved.num_tokens, len(tokens) - 1)
        length = min(chunk, len(tokens) - num_cached)
        num_shared = 0 if saved is not None else num_cached // size
        num_fresh = -(-(num_cached + length) // size) - num_shared
        if not free_slots or num_fresh > len(self.free_blocks):
            return False
        blocks = [] if source is None else source.blocks[:num_shared]
        self.holders.update(blocks)
        blocks += [self._take_block() for _ in range(num_fresh)]
        if source is not None and num_cached % size:
            plan.copies.append((source.blocks[num_shared], blocks[num_shared]))
        if saved is not None:
            plan.swaps_in += zip(saved.host_blocks, blocks, strict=False)
            del self.saved[request]
        slot = free_slots[0]
        self.generations[slot] += 1
        row = Row(request, slot, self.generations[slot], blocks, num_cached, len(tokens))
        self.rows[slot] = row
        request.place = Place.RUNNING
        plan.admits.append(
            Admission(
                slot=slot,
                generation=row.generation,
                token_ids=np.array(tokens, np.int32),
                num_prompt_tokens=len(request.prompt),
                num_cached_tokens=num_cached,
                block_ids=np.array(blocks, np.int32),
                sampling=SAMPLING,
            )
        )
        self._plan_row(row, length, plan)
        return True

    def _cached(self, request: ModelRequest, written: dict[int, int]) -> tuple[Row | None, int]:
        """
        Return a row that computes the same prefix, and how many leading tokens earlier steps wrote.
        """
        for row in self.rows.values():
            if request.parent is not None and row.request is request.parent:
                same = 0
                for mine, theirs in zip(request.tokens, row.request.tokens, strict=False):
                    if mine != theirs:
                        break
                    same += 1
                return row, min(same, len(request.tokens) - 1, written.get(row.slot, 0))
        return None, 0
