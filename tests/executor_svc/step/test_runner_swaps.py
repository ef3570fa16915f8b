"""The runner with host blocks: a preempted sequence goes on from what was swapped out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import SessionLost
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tests.executor_svc.step.test_runner import NOISY, decode, token_of
from tests.executor_svc.stepping import Bench, Row, admission, batch, random_tokens

Zoo = Callable[[str], Path]
PROMPT = random_tokens(20, seed=6)


@pytest.fixture
def bench(zoo: Zoo) -> Bench:
    return Bench.build(zoo("llama_gqa_llama3_rope"), block_size=8, num_blocks=12, num_host_blocks=6)


@pytest.fixture
def undisturbed(zoo: Zoo) -> list[int]:
    """Eight tokens of the prompt, alone and never preempted."""
    bench = Bench.build(zoo("llama_gqa_llama3_rope"), block_size=8, num_blocks=12)
    return start(bench, 8)


def start(bench: Bench, num_tokens: int) -> list[int]:
    """Compute the first tokens of the prompt in slot 0, blocks 1 to 4."""
    admit = admission(0, PROMPT, [1, 2, 3, 4], sampling=NOISY)
    first = bench.runner.execute(batch(Row(0, 0, 20), admits=[admit]), 1)
    return [token_of(first, 0), *decode(bench, 0, 20, num_tokens - 1)]


def scribble(bench: Bench) -> None:
    """Let another request write into every block that slot 0 had."""
    admit = admission(5, random_tokens(32, seed=9), [1, 2, 3, 4])
    bench.runner.execute(batch(Row(5, 0, 32), admits=[admit]), 50)
    bench.runner.execute(batch(releases=[5]), 51)


class TestSwap:
    def test_swapped_sequence_goes_on_with_its_own_tokens(
        self, bench: Bench, undisturbed: list[int]
    ):
        """
        A sequence that is swapped out at its release, overwritten, swapped in elsewhere and
        admitted with all its KV cached samples what it would have.
        """
        found = start(bench, 3)
        swaps = [(1, 6), (2, 1), (3, 2)]
        bench.runner.execute(batch(releases=[0], swaps_out=swaps), 10)
        scribble(bench)
        again = admission(2, PROMPT + found, [7, 3, 9], num_cached_tokens=22, sampling=NOISY)
        back = batch(Row(2, 22), admits=[again], swaps_in=[(6, 7), (1, 3), (2, 9)])
        found.append(token_of(bench.runner.execute(back, 60), 2))
        bench.runner.execute(batch(appends=[(2, 5)]), 61)
        found += decode(bench, 2, 23, 4, 62)
        assert undisturbed == found

    def test_only_some_blocks_may_be_swapped(self, bench: Bench, undisturbed: list[int]):
        """
        A sequence may come back with its leading blocks alone and compute the rest again.
        """
        found = start(bench, 3)
        bench.runner.execute(batch(releases=[0], swaps_out=[(1, 1), (2, 2)]), 10)
        scribble(bench)
        again = admission(2, PROMPT + found, [7, 8, 9], num_cached_tokens=16, sampling=NOISY)
        back = batch(Row(2, 16, 7), admits=[again], swaps_in=[(1, 7), (2, 8)])
        found.append(token_of(bench.runner.execute(back, 60), 2))
        assert undisturbed[:4] == found

    def test_swap_out_reads_before_the_batch_overwrites(self, bench: Bench, undisturbed: list[int]):
        """
        A block released and swapped out may be written by the same batch's copy, swap in and rows: the host has what
        was there before.
        """
        found = start(bench, 3)
        bench.runner.execute(batch(swaps_out=[(4, 6)]), 9)
        plan = batch(
            Row(5, 0, 8),
            releases=[0],
            swaps_out=[(1, 1), (2, 2), (3, 3)],
            copies=[(4, 1)],
            swaps_in=[(6, 2)],
            admits=[admission(5, random_tokens(8, seed=1), [3])],
        )
        bench.runner.execute(plan, 10)
        again = admission(2, PROMPT + found, [7, 8, 9], num_cached_tokens=22, sampling=NOISY)
        back = batch(Row(2, 22), admits=[again], swaps_in=[(1, 7), (2, 8), (3, 9)])
        found.append(token_of(bench.runner.execute(back, 60), 2))
        assert undisturbed[:4] == found

    @pytest.mark.parametrize("mode", KvMode)
    def test_swapped_sequence_outlives_a_suspension(
        self, bench: Bench, undisturbed: list[int], mode: KvMode
    ):
        """
        Swapped-out blocks stay readable whatever a suspension does to the device's memory.
        """
        found = start(bench, 3)
        bench.runner.execute(batch(releases=[0], swaps_out=[(1, 1), (2, 2), (3, 3)]), 10)
        bench.runner.suspend(mode)
        bench.runner.resume()
        again = admission(2, PROMPT + found, [1, 2, 3], num_cached_tokens=22, sampling=NOISY)
        back = batch(Row(2, 22), admits=[again], swaps_in=[(1, 1), (2, 2), (3, 3)])
        found.append(token_of(bench.runner.execute(back, 60), 2))
        assert undisturbed[:4] == found


NUM_BLOCKS, NUM_HOST_BLOCKS = 8, 5
BLOCKS = st.integers(1, NUM_BLOCKS)


@st.composite
def moving_batches(draw: st.DrawFn) -> list[Batch]:
    """Batches that only move blocks, as the link allows them, one after the other."""
    written: set[int] = set()
    batches = []
    for _ in range(draw(st.integers(1, 5))):
        hosts = draw(st.lists(st.integers(1, NUM_HOST_BLOCKS), max_size=3, unique=True))
        out = [(draw(BLOCKS), host) for host in hosts]
        readable = sorted(written - set(hosts))
        back = draw(st.lists(st.sampled_from(readable), max_size=3)) if readable else []
        targets = draw(st.permutations(range(1, NUM_BLOCKS + 1)))
        num_copies = draw(st.integers(0, 2))
        copied, filled = targets[:num_copies], targets[num_copies : num_copies + len(back)]
        sources = [block for block in range(1, NUM_BLOCKS + 1) if block not in copied]
        batches.append(
            batch(
                swaps_out=out,
                copies=[(draw(st.sampled_from(sources)), block) for block in copied],
                swaps_in=list(zip(back, filled, strict=True)),
            )
        )
        written |= set(hosts)
    return batches


@pytest.fixture(scope="module")
def small(zoo: Zoo) -> Bench:
    """Build a bench with so few blocks that random batches meet each other."""
    return Bench.build(
        zoo("llama_mha"),
        block_size=4,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        num_slots=1,
        max_model_len=16,
    )


class TestAnyBatches:
    @settings(max_examples=60, deadline=None)
    @given(batches=moving_batches())
    def test_every_batch_swaps_out_then_copies_then_swaps_in(
        self, small: Bench, batches: list[Batch]
    ):
        """
        All bits end where swapping out, then copying, then swapping in puts them, whatever blocks a
        batch swaps and copies, the same ones among them.
        """
        small.runner.reset()
        for number, layer in enumerate(small.kv.layers):
            for block in range(NUM_BLOCKS + 1):
                layer[block] = 100 * block + number
        device, host = list(range(NUM_BLOCKS + 1)), [0] * (NUM_HOST_BLOCKS + 1)
        for step, plan in enumerate(batches, 1):
            small.runner.execute(plan, step)
            for here, there in zip(plan.swap_out_block, plan.swap_out_host, strict=True):
                host[there] = device[here]
            before = list(device)
            for here, there in zip(plan.copy_source, plan.copy_destination, strict=True):
                device[there] = before[here]
            for here, there in zip(plan.swap_in_host, plan.swap_in_block, strict=True):
                device[there] = host[here]
        for number, layer in enumerate(small.kv.layers):
            expected = torch.tensor([100.0 * held + number for held in device])
            assert torch.equal(expected.view(-1, 1, 1, 1, 1).expand(layer.shape), layer)
        swapped = small.runner.slots.is_host_written.nonzero()[0].tolist()
        back = list(zip(swapped, range(1, NUM_BLOCKS + 1), strict=False))
        small.runner.execute(batch(swaps_in=back), len(batches) + 1)
        for host_block, block in back:
            assert (small.kv.layers[1][block] == 100.0 * host[host_block] + 1).all()


class TestRefusal:
    @pytest.mark.parametrize("swap", [{"swaps_out": [(1, 2)]}, {"swaps_in": [(1, 9)]}])
    def test_swaps_need_kv_memory(self, bench: Bench, swap: dict[str, list[tuple[int, int]]]):
        """
        Swapping while suspended is an error and changes nothing.
        """
        bench.runner.execute(batch(swaps_out=[(1, 1)]), 1)
        bench.runner.suspend(KvMode.OFFLOAD)
        with pytest.raises(SessionLost, match="suspended"):
            bench.runner.execute(batch(**swap), 2)
        bench.runner.resume()
        bench.runner.execute(batch(**swap), 3)

    def test_new_session_reads_nothing_of_the_last(self, bench: Bench):
        """
        After a reset no host block counts as written.
        """
        bench.runner.execute(batch(swaps_out=[(1, 1)]), 1)
        bench.runner.reset()
        with pytest.raises(SessionLost, match="swap_in_host 1 was never written"):
            bench.runner.execute(batch(swaps_in=[(1, 9)]), 1)

    def test_executor_without_host_blocks_refuses_swaps(self, zoo: Zoo):
        """
        Without swap space every swap is refused.
        """
        bench = Bench.build(zoo("llama_mha"))
        with pytest.raises(SessionLost, match="swap_out_host 1 is outside 1 to 0"):
            bench.runner.execute(batch(swaps_out=[(1, 1)]), 1)

    def test_warm_up_swaps_and_leaves_no_trace(self, bench: Bench):
        """
        Warming up uses host blocks too, and none counts as written after it.
        """
        bench.runner.warm_up()
        assert not bench.runner.slots.is_host_written.any()
