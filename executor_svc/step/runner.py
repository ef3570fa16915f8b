"""The runner, sole owner of the device: applies each step's delta, computes it and samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
import torch
from torch import Tensor

from executor_svc.device.out_of_memory import is_out_of_memory, step_out_of_memory
from executor_svc.device.queue import DeviceQueue, queue_of
from executor_svc.device.queue import Mark as Moment
from executor_svc.device.upload import upload
from executor_svc.memory.decode_bytes import RING_LINES
from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.decoder import Decoder
from executor_svc.model.loader import LoadedModel
from executor_svc.model.marked_parts import Mark, mark_parts, unmark_parts
from executor_svc.slots.checksum import token_checksum
from executor_svc.slots.logits_hook import LogitsHook
from executor_svc.slots.sampling import SlotSampling
from executor_svc.slots.tokens import SlotTokens
from executor_svc.step.batch_inputs import (
    SamplingRows,
    check_lengths,
    decoder_inputs,
    needs_kv,
    sampling_rows,
)
from executor_svc.step.build_graphs import StepParts, static_steps
from executor_svc.step.decode_graphs import DecodeGraphs
from executor_svc.step.graphs.plan import GraphPlan
from executor_svc.step.mixed_graphs import MixedGraphs
from executor_svc.step.outcome import StepOutcome
from executor_svc.step.pending_step import Launched, PendingStep, fetch_sampled, nothing_sampled
from executor_svc.step.prompt_scores import ScoredTokens, score, scored_tokens
from executor_svc.step.stage_results import stage_results
from executor_svc.step.warm_up import undivided_tokens, warm_up_batches
from kernels.paged_attention import AttentionShape
from kernels.sampling import Sampled
from tandem.errors import InvalidConfig, SessionLost
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem.link.slots.slot_state import SlotState

_log = structlog.get_logger(__name__)

MARGIN_EPS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Logit noise between two ways of computing the same sequence, by number type."""

_PARTS = ("_apply", "_compute", "_forward", "_sample")
"""Methods that make up a step."""


class ModelRunner:
    """
    An executor of steps; not thread-safe: one thread owns it and the model's device.

    Slots, block tables and lengths on the host follow the batches; KV contents and token histories
    are on the device.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KvMemory,
        *,
        num_slots: int,
        max_model_len: int,
        boot_id: str,
        collect_margins: bool = False,
        batch_invariant: bool = False,
        kv_knob: str = "max_num_blocks",
        clock_ns: Callable[[], int] = time.monotonic_ns,
        queue: DeviceQueue | None = None,
        static_rows: int = 0,
        graph_plan: GraphPlan | None = None,
        hook: LogitsHook | None = None,
    ) -> None:
        """
        Args:
            model: Weights and description. Where ranks share the model, the runners of all ranks
                get the same batches, and compute them together; see `StageResults` for stages.
            kv: KV memory of the geometry of the model, or of this rank.
            num_slots: Number of sequences that can be held.
            max_model_len: Most tokens of one sequence.
            boot_id: Id of the process, put into every result.
            collect_margins: Also report the margin by which each token won.
            batch_invariant: Give a sequence the same bits alone and beside any others; slower.
            kv_knob: The setting that sized `kv`, for the advice when memory runs out.
            clock_ns: Clock of monotonic time, for the step timings of a CPU.
            queue: Queue of the model's device; None makes one.
            static_rows: Most rows of decode steps in buffers that never move, as graphs need; or 0.
            graph_plan: Sizes of those steps, and shapes of steps with prompts, to capture at the
                warm-up; None captures none.
            hook: Changes the logits of rows before their tokens are drawn.
        """
        config = model.rank_config
        self._model = model
        self._kv = kv
        self._num_slots = num_slots
        self._max_model_len = max_model_len
        self._boot_id = boot_id
        self._kv_knob = kv_knob
        self._margin_eps = MARGIN_EPS[model.dtype] if collect_margins else None
        self._decoder = Decoder(model, max_model_len, batch_invariant=batch_invariant)
        self._windows = frozenset(config.windows)
        self._shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=kv.block_size,
            dtype=model.dtype,
            device=model.device,
            batch_invariant=batch_invariant,
        )
        self._slots, self._tokens = self._new_state()
        self._sampling = SlotSampling(num_slots, config.vocab_size, model.device, hook=hook)
        self._queue = queue or queue_of(model.device, clock_ns, RING_LINES)
        steps = static_steps(self._step_parts(), static_rows, graph_plan)
        self._static, self._graphs, self._mixed = steps
        self._results = stage_results(self._step_parts())

    @property
    def state_hash(self) -> int:
        """Hash of the slot state after the last batch."""
        return self._slots.state_hash

    @property
    def slots(self) -> SlotState:
        """Slot state after the last batch, for reading only."""
        return self._slots

    def reset(self) -> None:
        """
        Forget all slots and swapped-out blocks, as at the start of a session. KV memory keeps its
        contents, and is resumed if it is suspended.
        """
        self._resume_kv()
        self._forget()

    def suspend(self, mode: KvMode) -> None:
        """
        Give KV memory back as `mode` says, until `resume`. If its addresses may change, graphs are
        dropped here and captured again by `resume`; see `keeps_addresses` of `KvMemory`.

        Raises:
            SessionLost: The mode is RECOMPUTE while slots are live, which would lose their KV.
            OutOfMemory: The mode is OFFLOAD and the host has no room; nothing has changed.
        """
        if mode is KvMode.RECOMPUTE and (num_live := int(self._slots.live.sum())):
            raise SessionLost(
                f"suspend with RECOMPUTE while {num_live} slots are live: release them first"
            )
        self._kv.check_suspension(mode)
        moves = mode is not KvMode.PERSIST and not self._kv.keeps_addresses
        for graphs in self._captured() if moves else ():
            graphs.drop()
        self._kv.suspend(mode)
        _log.info("kv_suspended", mode=mode.name, kv_bytes=self._kv.device_bytes)

    def resume(self) -> None:
        """End a suspension; without one, do nothing. Errors are those of `KvMemory.resume`."""
        self._resume_kv()
        _log.info("kv_resumed", kv_bytes=self._kv.device_bytes)

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        """Launch one step and wait for its result; see `launch`."""
        return self.launch(batch, step_id)()

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        """
        Apply one batch and launch its rows on the device.

        Args:
            batch: The delta.
            step_id: Id of the step, put into the result.

        Returns:
            A function that waits for the result: one entry per row that sampled, in batch order,
            and errors of rows that failed alone. Any thread may call it, once and in the order of
            launches. The caller sets `timings.queued_ns`.

        Raises:
            SessionLost: The batch contradicts the slot state, takes a slot past max_model_len, or
                KV memory is suspended; nothing has changed.
            OutOfMemory: The step needs more memory than there is; names the settings that make such
                a step smaller. The session is over.
        """
        try:
            return self._launch(batch, step_id).result
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_out_of_memory(error):
                raise
            raise step_out_of_memory(error, batch, self._kv_knob) from error

    def _launch(self, batch: Batch, step_id: int) -> PendingStep:
        self._apply(batch)
        rows, scored = sampling_rows(batch), scored_tokens(batch, self._sampling)
        with torch.inference_mode():
            if self._static is not None and self._static.takes(batch):
                launched = self._static.launch(batch, rows, self._slots, self._queue)
            elif not scored and self._mixed and (shape := self._mixed.shape_for(batch, rows)):
                launched = self._mixed.launch(shape, batch, rows, self._slots, self._queue)
            else:
                launched = self._compute(batch, rows, scored)
            queue = launched.queue or self._queue  # another one while they arrive
            ended = queue.mark()
            collect, scores = launched.fetch(queue), launched.fetch_scores(queue)
        ends = batch.row_start + batch.row_num_tokens
        bad_input = batch.row_slot[self._tokens.has_bad_input(batch.row_slot, ends)]
        return PendingStep(
            boot_id=self._boot_id,
            step_id=step_id,
            outcome=lambda: StepOutcome.of(rows.slot, rows.position, collect()),
            scores=scores,
            generation=self._slots.generation.copy(),
            bad_input_slots=bad_input.tolist(),
            vocab_size=self._model.config.vocab_size,
            graph=launched.graph,
            device_memory_bytes=self._model.weight_bytes + self._kv.device_bytes,
            started=launched.started,
            forwarded=launched.forwarded,
            ended=ended,
        )

    def capture_decode_graph(self, batch_size: int) -> None:
        """
        Capture steps of so many decodes as well; graphs captured before stay.

        Raises:
            InvalidConfig: The runner captures no graphs, or no step has so many rows.
            SessionLost: KV memory is suspended.
        """
        if self._graphs is None:
            raise InvalidConfig("this executor captures no graphs: it runs every step eagerly")
        if self._kv.is_suspended:
            raise SessionLost("graphs need KV memory, which is suspended: resume first")
        self._graphs.add(batch_size)

    def has_decode_graph(self, batch: Batch) -> bool:
        """Return True if `execute` runs this batch, of decodes only, by a captured graph."""
        if self._graphs is None or self._static is None or not self._static.takes(batch):
            return False
        return self._graphs.size_for(len(batch.row_slot)) is not None

    def warm_up(self, *, every_kind: bool = True, max_step_tokens: int = 0) -> None:
        """
        Run steps of typical shapes once and capture graphs, so that no request waits for it; all
        slots are forgotten afterwards. `max_step_tokens` bounds the tokens of a step. With
        `every_kind`, features that few requests use are run too, which compiles kernels on a GPU.
        """
        block_size, num_blocks = self._kv.block_size, self._kv.num_blocks
        kv_len = min(self._max_model_len, num_blocks * block_size)
        rows = self._num_slots if self._static is None else self._static.step.max_rows
        compiles = every_kind and self._model.device.type != "cpu"
        rows, is_cut = min(rows, num_blocks), compiles and self._shape.batch_invariant
        tokens = min(max_step_tokens, undivided_tokens(self._model.weights)) if is_cut else 0
        steps = warm_up_batches(
            kv_len, block_size, rows, compiles=compiles, step_tokens=tokens, num_blocks=num_blocks
        )
        self._rehearse(steps)
        for graphs in self._captured():
            graphs.capture()
        if self._captured():
            self._rehearse(steps)  # a capture gives back memory that PyTorch keeps for such steps
        self._kv.warm_up()

    def checksum(self) -> int:
        """Return a checksum of what ranks must have in common; it waits for the device."""
        return token_checksum(self._slots, self._tokens)

    def compare_ranks(self) -> None:
        """Compare the latest hidden states with those of other ranks; see `Decoder`."""
        self._decoder.compare_ranks()

    def mark_parts(self, mark: Mark) -> None:
        """
        Wrap the parts of steps with `mark`: "apply", "compute", within it "forward" with each
        layer's "attention" and "mlp", and "sample" with "project"; captured decodes have "apply".
        """
        mark_parts(self, _PARTS, mark)
        self._decoder.mark_parts(mark)

    def unmark_parts(self) -> None:
        """Undo `mark_parts`."""
        unmark_parts(self, _PARTS)
        self._decoder.unmark_parts()

    def _apply(self, batch: Batch) -> None:
        if self._kv.is_suspended and needs_kv(batch):
            raise SessionLost("a batch needs KV memory while it is suspended: resume first")
        check_lengths(batch, self._max_model_len)
        self._slots.apply(batch)
        if len(batch.swap_out_block):
            self._kv.swap_out(batch.swap_out_block, batch.swap_out_host)
        if len(batch.copy_source):
            self._kv.copy_blocks(
                upload(batch.copy_source, self._model.device),
                upload(batch.copy_destination, self._model.device),
            )
        if len(batch.swap_in_host):
            self._kv.swap_in(batch.swap_in_host, batch.swap_in_block)
        for admission in batch.admits:
            self._tokens.admit(admission)
            self._sampling.admit(admission)
            if self._static is not None:
                self._static.admit(admission)

    def _forward(self, batch: Batch) -> tuple[Moment, Tensor]:
        if len(batch.row_slot) == 0:
            return self._queue.mark(), self._decoder.no_hidden_states()
        tokens = self._tokens if self._results is None or self._results.is_first else None
        inputs = decoder_inputs(batch, self._slots, tokens, self._shape, self._windows)
        return self._queue.mark(), self._decoder.forward(inputs, self._kv.layers)

    def _compute(
        self, batch: Batch, rows: SamplingRows, scored: ScoredTokens | None = None
    ) -> Launched:
        """Compute a step of any rows eagerly; its inputs are sent with it."""
        started, hidden = self._forward(batch)
        forwarded = self._queue.mark()
        if self._results is not None and not self._results.is_last:
            return self._results.receive(
                rows, scored, started, forwarded, self._queue, num_tokens=len(hidden)
            )
        scores = None
        if scored is not None:
            scores = score(hidden, scored, self._tokens, self._decoder)
        sampled = self._sample(hidden, rows)
        if len(rows.slot):
            self._tokens.write(rows.slot, rows.position, sampled.token)
        if self._results is not None:
            self._results.send(sampled, scores, num_tokens=len(hidden))
        fetch = partial(fetch_sampled, sampled)
        return Launched(fetch=fetch, started=started, forwarded=forwarded, scores=scores)

    def _sample(self, hidden: Tensor, rows: SamplingRows) -> Sampled:
        if len(rows.slot) == 0:
            return nothing_sampled(hidden.device, with_margin=self._margin_eps is not None)
        if len(rows.slot) < hidden.shape[0]:
            hidden = hidden.index_select(0, upload(rows.hidden_row, hidden.device))
        logits = self._decoder.project(hidden)  # sampling widens the type of what it reads
        return self._sampling.draw(
            logits,
            rows.slot,
            rows.position,
            self._tokens,
            margin_eps=self._margin_eps,
            shard=self._decoder.shard,
        )

    def _rehearse(self, steps: Sequence[Batch]) -> None:
        for batch in steps:
            self.execute(batch, 0)
        self._forget()

    def _forget(self) -> None:
        self._slots.reset()
        if self._static is not None:
            self._static.forget()

    def _resume_kv(self) -> None:
        self._kv.resume()
        for graphs in self._captured():
            graphs.restore()

    def _captured(self) -> list[DecodeGraphs | MixedGraphs]:
        """Return all graphs in the order of capture: those that need most memory come first."""
        return [graphs for graphs in (self._mixed, self._graphs) if graphs is not None]

    def _step_parts(self) -> StepParts:
        return StepParts(
            decoder=self._decoder,
            kv_layers=self._kv.layers,
            tokens=self._tokens,
            sampling=self._sampling,
            shape=self._shape,
            windows=self._windows,
            num_slots=self._num_slots,
            max_blocks=self._slots.max_blocks_per_slot,
            margin_eps=self._margin_eps,
        )

    def _new_state(self) -> tuple[SlotState, SlotTokens]:
        kv = self._kv
        max_blocks = math.ceil(self._max_model_len / kv.block_size)
        sizes = max_blocks, kv.block_size, kv.num_blocks, kv.num_host_blocks
        slots = SlotState(self._num_slots, *sizes)
        vocab_size, device = self._model.config.vocab_size, self._model.device
        return slots, SlotTokens(self._num_slots, self._max_model_len, vocab_size, device)
