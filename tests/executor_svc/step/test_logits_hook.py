"""A hook that changes logits before tokens are drawn, and the numbers of the rows it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.slots.logits_hook import LogitsHook
from executor_svc.slots.metadata import MetadataType
from executor_svc.slots.numbers import SlotNumbers
from tests.executor_svc.step.test_static_step import is_same, joins_and_leaves, twins
from tests.executor_svc.stepping import GREEDY, Bench, Row, batch

Zoo = Callable[[str], Path]

WANTED = MetadataType("wanted", "int32", on_gpu=True)
NOISY = replace(GREEDY, temperature=1.0, seed=5)


def wanting(token: int, sampling=GREEDY):
    """Return params of a row that is to draw one token again and again."""
    return replace(sampling, row_metadata=(("wanted", token),))


def in_place(logits, rows):
    """Let each row draw the token it wants."""
    logits[torch.arange(len(rows)), rows["wanted"].long()] = 1e4


def anew(logits, rows):
    """Return other logits, of another number type."""
    changed = logits.double()
    in_place(changed, rows)
    return changed


def hooked(call) -> LogitsHook:
    return LogitsHook(call=call, types=(WANTED, MetadataType("temperature", "float32", True)))


@pytest.mark.parametrize("call", [in_place, anew])
def test_rows_that_come_and_go_draw_what_the_hook_makes_likeliest(zoo: Zoo, call):
    """
    Each row has its own request's number, eagerly and in static buffers, in any order of rows.
    """
    eager, static = twins(zoo("llama_mha"), hook=hooked(call))
    samplings = [
        wanting(11),
        wanting(22, NOISY),
        wanting(33, replace(GREEDY, logprobs=2)),
        wanting(44, replace(NOISY, top_k=5)),
    ]
    wanted: dict[int, int] = {}
    drawn: set[int] = set()
    for step_id, plan in enumerate(joins_and_leaves(eager.block_ids, samplings), 1):
        for admit in plan.admits:
            wanted[admit.slot] = dict(admit.sampling.row_metadata)["wanted"]
        result = eager.runner.execute(plan, step_id)
        assert [wanted[slot] for slot in result.slot.tolist()] == result.token.tolist()
        assert is_same(result, static.runner.execute(plan, step_id))
        drawn.update(result.token.tolist())
    assert {11, 22, 33, 44} == drawn


def test_a_row_shows_its_tokens_and_parameters(zoo: Zoo):
    """
    A hook gets a row's tokens so far, and the sampling parameters that its types name.
    """
    seen = []

    def look(logits, rows):
        lengths = rows.num_tokens.tolist()
        tokens = [row[:length] for row, length in zip(rows.tokens().tolist(), lengths, strict=True)]
        seen.append((tokens, rows["temperature"].tolist()))

    bench = Bench.build(zoo("llama_mha"), hook=hooked(look))
    admits = [bench.admit(2, [5, 6, 7]), bench.admit(0, [8, 9], sampling=NOISY)]
    first = bench.runner.execute(batch(Row(2, 0, 3), Row(0, 0, 2), admits=admits), 1)
    bench.runner.execute(batch(Row(0, 2), Row(2, 3)), 2)
    of_two, of_none = first.token.tolist()
    assert ([[5, 6, 7], [8, 9]], [0.0, 1.0]) == seen[0]
    assert ([[8, 9, of_none], [5, 6, 7, of_two]], [1.0, 0.0]) == seen[1]


def test_a_row_that_the_hook_spoils_fails_alone(zoo: Zoo):
    """
    NaN in one row's logits is an error of this row.
    """

    def spoil(logits, rows):
        logits[rows["wanted"] == 1] = torch.nan

    bench = Bench.build(zoo("llama_mha"), hook=hooked(spoil))
    admits = [bench.admit(slot, [5, 6], sampling=wanting(slot)) for slot in (0, 1)]
    result = bench.runner.execute(batch(Row(0, 0, 2), Row(1, 0, 2), admits=admits), 1)
    assert [1] == [error.slot for error in result.row_errors]
    assert [0] == result.slot.tolist()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda logits: logits[:, :-1], "shape"),
        (lambda logits: logits.argmax(1), "torch.int64"),
        (lambda _: "logits", "got str"),
    ],
)
def test_an_answer_that_is_no_logits_is_told(zoo: Zoo, answer, words):
    """
    A hook that returns anything but logits of the same shape, or None, ends the step.
    """
    bench = Bench.build(zoo("llama_mha"), hook=hooked(lambda logits, _: answer(logits)))
    step = batch(Row(0, 0, 2), admits=[bench.admit(0, [5, 6])])
    with pytest.raises(ValueError, match=f"logits_hook must return.*{words}"):
        bench.runner.execute(step, 1)


def test_a_label_without_a_type_is_told_with_those_there_are(zoo: Zoo):
    """
    A hook that asks for a label of no metadata type gets a KeyError that lists the labels.
    """
    bench = Bench.build(zoo("llama_mha"), hook=hooked(lambda _, rows: rows["steer"]))
    step = batch(Row(0, 0, 2), admits=[bench.admit(0, [5, 6])])
    with pytest.raises(KeyError, match=r"'steer'.*temperature.*wanted"):
        bench.runner.execute(step, 1)


def test_numbers_lie_where_their_types_say():
    """
    A column of the device is read there and any other on the host; the next request of a slot has
    none of the last one's numbers.
    """
    types = [MetadataType("here", "bool", False), MetadataType("there", "int64", True)]
    numbers = SlotNumbers(4, types, torch.device("meta"))
    slot = np.array([3, 1], np.int32)
    numbers.put(3, {"here": True, "there": 2**40})
    assert [True, False] == numbers.rows("here", slot).tolist()
    assert [2**40, 0] == numbers.of("there", slot).tolist()
    there = numbers.rows("there", slot)
    assert ("meta", torch.int64, (2,)) == (there.device.type, there.dtype, there.shape)
    numbers.put(3, {})
    assert [0, 0] == numbers.of("there", slot).tolist()
    assert [False, False] == numbers.rows("here", slot).tolist()
