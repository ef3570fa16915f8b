"""
Executor for the link's model; its KV memory records what each position holds and checks every read.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from tandem.errors import StreamReplaced, TandemError
from tandem.link.batch import ROW_SAMPLES, Batch, Int32Column
from tandem.link.codec.wire import decode_request, encode_response
from tandem.link.commands import KvMode, Resume, Step, Suspend
from tandem.link.executor_end import ExecutorEnd
from tandem.link.results import StepFailed, StepResult
from tandem.link.session import Attach, SchedulerId
from tandem.link.slots.slot_state import SlotState
from tests.link.model.model_requests import extend, next_token
from tests.link.model.model_scheduler import Geometry
from tests.link.model.network import Stream
from tests.link.slots.whole_hash import hash_from_scratch


class FakeExecutor:
    """Queue, slots and KV memory of one boot; `end` and `slots` are the code under test."""

    def __init__(self, end: ExecutorEnd, slots: SlotState, geometry: Geometry) -> None:
        self.end = end
        self.slots = slots
        self.geometry = geometry
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}
        self.host_kv: dict[tuple[int, int], tuple[int, int]] = {}
        self.queue: deque[Step] = deque()
        self.running: Step | None = None
        self.stream: Stream | None = None
        self.executed: list[tuple[int, int]] = []
        self.reset()

    def reset(self) -> None:
        """Empty all slots; KV memory keeps its stale content, as a device does."""
        self.slots.reset()
        self.tokens: dict[int, list[int]] = {}
        self.suspended: KvMode | None = None

    def open_session(
        self, scheduler: SchedulerId, take_over: bool, lease_s: float, now: float
    ) -> int:
        epoch = self.end.open_session(scheduler, take_over, lease_s, now)
        self.end_stream(self.end.fenced())
        self.purge()
        while self.running is not None:
            self.finish()
        self.reset()
        return epoch

    def end_stream(self, why: TandemError) -> None:
        """
        Tell the attached stream that it is over, since its scheduler may be waiting for a result.
        """
        if self.stream is not None:
            self.stream.send_up(why)
            self.stream = None

    def purge(self) -> None:
        self.queue.clear()

    def receive(self, stream: Stream, raw: bytes, now: float) -> None:
        message = decode_request(raw)
        if isinstance(message, Attach):
            attached, replay = self.end.attach(message, now)
            self.end_stream(StreamReplaced(f"stream {message.attach_id} came"))
            self.stream = stream
            stream.up.extend([encode_response(attached), *replay])
        elif self.end.receive(message, raw, stream.attach.attach_id, now):
            self.queue.append(message)

    def start(self, now: float) -> None:
        if not self.end.can_execute:
            self.queue.clear()
        if self.running is None and self.queue:
            self.running = self.queue.popleft()
            assert self.running.session_epoch == self.end.session_epoch, "a purged step was started"
            self.end.start(self.running.step_id, now)

    def finish(self) -> None:
        if self.running is None:
            return
        step, self.running = self.running, None
        encoded = encode_response(self.compute(step))
        if self.end.complete(step.session_epoch, step.step_id, encoded):
            assert self.stream is not None
            self.stream.send_up(encoded)

    def fail(self) -> None:
        """Fail the running step as a whole: it has no effect."""
        step, self.running = self.running, None
        assert step is not None
        failure = StepFailed(
            boot_id=self.end.boot_id, step_id=step.step_id, reason="INTERNAL", message="broken"
        )
        encoded = encode_response(failure)
        if self.end.complete(step.session_epoch, step.step_id, encoded, failed=True):
            assert self.stream is not None
            self.stream.send_up(encoded)

    def heartbeat(self, now: float) -> None:
        beat = self.end.heartbeat(now)
        if self.end.attach_id and self.stream is not None:
            self.stream.send_up(encode_response(beat))

    def compute(self, step: Step) -> StepResult:
        self.executed.append((step.session_epoch, step.step_id))
        drawn: list[tuple[int, int, int, int]] = []
        match step.command:
            case Batch() as batch:
                assert self.suspended is None, "a batch came during a suspension"
                drawn = self.forward(batch)
            case Suspend(kv_mode=mode):
                self.suspended = mode
                if mode is KvMode.RECOMPUTE:
                    assert not self.slots.live.any()
                    self.kv.clear()
            case Resume():
                self.suspended = None
        assert step.state_hash == self.slots.state_hash, "the state hashes differ"
        assert self.slots.state_hash == hash_from_scratch(self.slots)
        columns = np.array(drawn, np.int32).reshape(-1, 4)
        return StepResult(
            boot_id=self.end.boot_id,
            step_id=step.step_id,
            slot=columns[:, 0],
            generation=columns[:, 1].astype(np.uint32),
            position=columns[:, 2],
            token=columns[:, 3],
        )

    def forward(self, batch: Batch) -> list[tuple[int, int, int, int]]:
        """Run a batch; every position a row attends to must hold its own prefix."""
        self.slots.apply(batch)
        self.swap_out(batch)
        self.copy_blocks(batch)
        self.swap_in(batch)
        for admission in batch.admits:
            self.tokens[admission.slot] = admission.token_ids.tolist()
        rows = list(
            zip(
                batch.row_slot.tolist(),
                batch.row_start.tolist(),
                batch.row_num_tokens.tolist(),
                batch.row_flags.tolist(),
                strict=True,
            )
        )
        for slot, start, _, _ in rows:
            self.check_prefix(slot, start)
        for slot, start, length, _ in rows:
            self.write(slot, start, length)
        drawn = []
        for slot, start, length, flags in rows:
            identity = self.check_prefix(slot, start + length)
            if flags == ROW_SAMPLES:
                token = next_token(identity)
                self.tokens[slot].append(token)
                generation = int(self.slots.generation[slot])
                drawn.append((slot, generation, start + length, token))
        return drawn

    def swap_out(self, batch: Batch) -> None:
        """Copy device blocks to host blocks."""
        self.move(self.kv, batch.swap_out_block, self.host_kv, batch.swap_out_host)

    def copy_blocks(self, batch: Batch) -> None:
        """Copy, reading everything before writing anything."""
        self.move(self.kv, batch.copy_source, self.kv, batch.copy_destination)

    def swap_in(self, batch: Batch) -> None:
        """Copy host blocks to device blocks."""
        self.move(self.host_kv, batch.swap_in_host, self.kv, batch.swap_in_block)

    def move(self, origin, source: Int32Column, target, destination: Int32Column) -> None:
        """Copy whole blocks; a position without content becomes empty at its destination too."""
        pairs = zip(source.tolist(), destination.tolist(), strict=True)
        found = [
            ((there, offset), origin.get((here, offset)))
            for here, there in pairs
            for offset in range(self.geometry.block_size)
        ]
        for place, content in found:
            if content is None:
                target.pop(place, None)
            else:
                target[place] = content

    def place_of(self, slot: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.geometry.block_size)
        assert index < self.slots.num_blocks_held[slot]
        return int(self.slots.block_table[slot, index]), offset

    def write(self, slot: int, start: int, length: int) -> None:
        identity = 7
        for position, token in enumerate(self.tokens[slot][: start + length]):
            identity = extend(identity, token)
            if position >= start:
                self.kv[self.place_of(slot, position)] = (position, identity)

    def check_prefix(self, slot: int, length: int) -> int:
        """Check that the slot's blocks hold its own tokens; return the prefix's identity."""
        identity = 7
        for position, token in enumerate(self.tokens[slot][:length]):
            identity = extend(identity, token)
            content = self.kv.get(self.place_of(slot, position))
            assert content == (position, identity), f"slot {slot} reads foreign KV at {position}"
        return identity
