"""
Values of the step link for its tests: strategies, builders and a comparison that sees columns.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
from hypothesis import strategies as st

from tandem.link.batch import Admission, Batch
from tandem.link.commands import Command, KvMode, Resume, Step, Suspend
from tandem.link.logprobs import LogprobColumns, PromptLogprobColumns
from tandem.link.results import RowError, RowErrorKind, StepFailed, StepResult, StepTimings
from tandem.link.session import Attach, Attached, Heartbeat, SchedulerId
from tandem.sampling_params import MAX_TEMPERATURE, SamplingParams

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
UINT64 = st.integers(0, 2**64 - 1)
UINT32 = st.integers(0, 2**32 - 1)
SLOT = st.integers(0, 2**31 - 1)


def scheduler_id(name: str, incarnation: str = "1") -> SchedulerId:
    """Return the identity of a scheduler."""
    return SchedulerId(name=name, incarnation=incarnation)


def ints(*values: int) -> np.ndarray:
    """Return an int32 column."""
    return np.array(values, np.int32)


def flags(*values: int) -> np.ndarray:
    """Return a uint8 column."""
    return np.array(values, np.uint8)


def admission(
    slot: int, generation: int, tokens: int, blocks: list[int], cached: int = 0
) -> Admission:
    """Return the admission of a row with this many tokens, all of them prompt."""
    return Admission(
        slot=slot,
        generation=generation,
        token_ids=np.arange(tokens, dtype=np.int32),
        num_prompt_tokens=tokens,
        num_cached_tokens=cached,
        block_ids=ints(*blocks),
        sampling=GREEDY,
    )


def rows(*entries: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """Return row columns from (slot, start, number of tokens, flags)."""
    table = np.array(entries, np.int64).reshape(-1, 4)
    return {
        "row_slot": table[:, 0].astype(np.int32),
        "row_start": table[:, 1].astype(np.int32),
        "row_num_tokens": table[:, 2].astype(np.int32),
        "row_flags": table[:, 3].astype(np.uint8),
    }


def step(
    step_id: int,
    acked: int = 0,
    epoch: int = 1,
    state_hash: int = 0,
    command: Command | None = None,
) -> Step:
    """Return a step, by default with an empty batch."""
    return Step(
        session_epoch=epoch,
        step_id=step_id,
        acked_step_id=acked,
        state_hash=state_hash,
        command=Batch() if command is None else command,
    )


def result(step_id: int, boot_id: str = "boot") -> StepResult:
    """Return a result without a token."""
    return StepResult(
        boot_id=boot_id,
        step_id=step_id,
        slot=ints(),
        generation=np.empty(0, np.uint32),
        position=ints(),
        token=ints(),
    )


def same(left: object, right: object) -> bool:
    """Return if two values are equal, columns in them and the types of columns included."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(
            left, right, equal_nan=left.dtype == "f4"
        )
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if is_dataclass(left):
        names = [field.name for field in fields(left)]
        alike = type(left) is type(right)
        return alike and all(same(getattr(left, name), getattr(right, name)) for name in names)
    return left == right


def columns(dtype: type, length: int) -> st.SearchStrategy[np.ndarray]:
    """Return a strategy for columns of any values of an integer type."""
    info = np.iinfo(dtype)
    values = st.lists(st.integers(info.min, info.max), min_size=length, max_size=length)
    return values.map(lambda found: np.array(found, dtype))


@st.composite
def admissions(draw: st.DrawFn) -> Admission:
    return Admission(
        slot=draw(SLOT),
        generation=draw(UINT32),
        token_ids=draw(columns(np.int32, draw(st.integers(0, 5)))),
        num_prompt_tokens=draw(UINT32),
        num_cached_tokens=draw(UINT32),
        block_ids=draw(columns(np.int32, draw(st.integers(0, 5)))),
        sampling=SamplingParams(
            temperature=draw(st.floats(0, MAX_TEMPERATURE, width=32)),
            top_k=draw(SLOT),
            top_p=draw(st.floats(2.0**-20, 1, width=32)),
            seed=draw(UINT64),
            choice=draw(UINT32),
            repetition_penalty=draw(st.floats(2.0**-20, 1e3, width=32)),
            frequency_penalty=draw(st.floats(-2, 2, width=32)),
            presence_penalty=draw(st.floats(-2, 2, width=32)),
            min_p=draw(st.floats(0, 1, width=32)),
            min_tokens=draw(SLOT),
            end_ids=tuple(draw(st.lists(SLOT, max_size=3))),
            logit_bias=tuple(
                draw(st.dictionaries(SLOT, st.floats(-100, 100, width=32), max_size=3)).items()
            ),
            logprob_token_ids=tuple(draw(st.lists(SLOT, max_size=3))),
            allowed_token_ids=tuple(draw(st.sets(SLOT, max_size=3))),
            logprobs=draw(st.none() | st.integers(0, 20)),
            prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        ),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_rows, num_appends, num_copies, num_out, num_in = (draw(st.integers(0, 4)) for _ in range(5))
    return Batch(
        admits=tuple(draw(st.lists(admissions(), max_size=2))),
        row_slot=draw(columns(np.int32, num_rows)),
        row_num_tokens=draw(columns(np.int32, num_rows)),
        row_start=draw(columns(np.int32, num_rows)),
        row_flags=draw(columns(np.uint8, num_rows)),
        append_slot=draw(columns(np.int32, num_appends)),
        append_block=draw(columns(np.int32, num_appends)),
        release_slot=draw(columns(np.int32, draw(st.integers(0, 4)))),
        copy_source=draw(columns(np.int32, num_copies)),
        copy_destination=draw(columns(np.int32, num_copies)),
        swap_out_block=draw(columns(np.int32, num_out)),
        swap_out_host=draw(columns(np.int32, num_out)),
        swap_in_host=draw(columns(np.int32, num_in)),
        swap_in_block=draw(columns(np.int32, num_in)),
    )


COMMANDS = st.one_of(
    batches(), st.builds(Suspend, kv_mode=st.sampled_from(KvMode)), st.just(Resume())
)
STEPS = st.builds(
    Step,
    session_epoch=UINT64,
    step_id=UINT64,
    acked_step_id=UINT64,
    state_hash=UINT64,
    command=COMMANDS,
)
ATTACHES = st.builds(
    Attach, boot_id=st.text(), session_epoch=UINT64, attach_id=UINT64, acked_step_id=UINT64
)
ROW_ERRORS = st.builds(
    RowError, slot=UINT32, generation=UINT32, kind=st.sampled_from(RowErrorKind), message=st.text()
)


@st.composite
def logprobs(draw: st.DrawFn, num_rows: int) -> LogprobColumns:
    """Draw log probabilities of some of the `num_rows` rows of a result."""
    row = sorted(draw(st.sets(st.integers(0, num_rows - 1)))) if num_rows else []
    count = [draw(st.integers(0, 3)) for _ in row]
    floats = st.floats(width=32)
    return LogprobColumns(
        row=ints(*row),
        chosen=np.array([draw(floats) for _ in row], np.float32),
        top_start=np.cumsum([0, *count]).astype(np.int32),
        top_token=draw(columns(np.int32, sum(count))),
        top=np.array([draw(floats) for _ in range(sum(count))], np.float32),
    )


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobColumns:
    """Draw log probabilities of a few prompt tokens."""
    count = draw(st.integers(0, 4))
    tops = [draw(st.integers(0, 3)) for _ in range(count)]
    floats = st.floats(width=32)
    return PromptLogprobColumns(
        slot=draw(columns(np.int32, count)),
        generation=draw(columns(np.uint32, count)),
        position=draw(columns(np.int32, count)),
        rank=draw(columns(np.int32, count)),
        columns=LogprobColumns(
            row=ints(*range(count)),
            chosen=np.array([draw(floats) for _ in range(count)], np.float32),
            top_start=np.cumsum([0, *tops]).astype(np.int32),
            top_token=draw(columns(np.int32, sum(tops))),
            top=np.array([draw(floats) for _ in range(sum(tops))], np.float32),
        ),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    num_rows = draw(st.integers(0, 4))
    margins = st.lists(st.floats(width=32), min_size=num_rows, max_size=num_rows)
    with_margin = num_rows > 0 and draw(st.booleans())
    return StepResult(
        boot_id=draw(st.text()),
        step_id=draw(UINT64),
        slot=draw(columns(np.int32, num_rows)),
        generation=draw(columns(np.uint32, num_rows)),
        position=draw(columns(np.int32, num_rows)),
        token=draw(columns(np.int32, num_rows)),
        row_errors=tuple(draw(st.lists(ROW_ERRORS, max_size=2))),
        timings=StepTimings(
            queued_ns=draw(UINT64),
            forward_ns=draw(UINT64),
            sample_ns=draw(UINT64),
            total_ns=draw(UINT64),
        ),
        graph=draw(st.integers(0, 2**32 - 1)),
        device_memory_bytes=draw(UINT64),
        margin=np.array(draw(margins), np.float32) if with_margin else None,
        logprobs=draw(st.none() | logprobs(num_rows)),
        prompt_logprobs=draw(st.none() | prompt_logprobs()),
    )


RESPONSES = st.one_of(
    results(),
    st.builds(
        Attached, boot_id=st.text(), last_received_step_id=UINT64, last_completed_step_id=UINT64
    ),
    st.builds(Heartbeat, running_step_id=UINT64, elapsed_ms=UINT64, last_completed_step_id=UINT64),
    st.builds(
        StepFailed,
        boot_id=st.text(),
        step_id=UINT64,
        reason=st.text(),
        message=st.text(),
        sticky=st.booleans(),
    ),
)
