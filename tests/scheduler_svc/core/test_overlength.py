"""Requests longer than fits: refused by default, cut under overlength=truncate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.admission import Acceptance
from scheduler_svc.core.request.block_hashes import block_digests
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, Overlength
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import NeverFits, PromptTooLong, TotalTooLong
from tests.scheduler_svc.core.fake_executor import expected_outputs
from tests.scheduler_svc.core.harness import GREEDY, Rig, small_config

TRUNCATE = CoreOptions(overlength=Overlength.TRUNCATE)


def rig_of(**changes) -> Rig:
    return Rig(small_config(**changes), options=TRUNCATE)


def new_request(prompt_len: int, max_tokens: int, **changes) -> NewRequest:
    values = {
        "request_id": "long",
        "handle": 0,
        "prompt": np.arange(prompt_len, dtype=np.int32) % 50,
        "sampling": GREEDY,
        "max_tokens": max_tokens,
        "arrival_s": 0.0,
    }
    return NewRequest(**(values | changes))


def submit(rig: Rig, new: NewRequest) -> Acceptance:
    rig.submitted[new.handle] = new
    return rig.core.submit(new, rig.now)


class TestReject:
    @pytest.mark.parametrize(
        ("prompt_len", "max_tokens", "error"), [(60, 5, TotalTooLong), (65, 1, PromptTooLong)]
    )
    def test_overlong_requests_are_refused_by_default(self, prompt_len, max_tokens, error):
        """
        The core refuses what does not fit and cuts nothing, unless told otherwise.
        """
        with pytest.raises(error) as caught:
            submit(Rig(), new_request(prompt_len, max_tokens))
        assert {"limit": "max_model_len", "value": "64"} == caught.value.metadata

    def test_what_fits_is_taken_as_it_is(self):
        """
        A request that fits is taken uncut, which its acceptance says.
        """
        expected = Acceptance(num_truncated_tokens=0, max_tokens=4)
        assert expected == submit(Rig(), new_request(60, 4))
        assert expected == submit(rig_of(), new_request(60, 4))


class TestTruncate:
    def test_the_output_is_lowered_to_what_fits(self):
        """
        A prompt with too many tokens asked for keeps all its own and ends with CONTEXT_LIMIT.
        """
        rig = rig_of()
        accepted = submit(rig, new_request(60, 100))
        assert Acceptance(num_truncated_tokens=0, max_tokens=4) == accepted
        rig.run()
        assert (4, FinishReason.CONTEXT_LIMIT) == (len(rig.outputs[0]), rig.ended[0].reason)

    @pytest.mark.parametrize(
        ("prompt_len", "asked", "num_cut", "granted", "reason"),
        [
            (63, 10, 0, 1, FinishReason.CONTEXT_LIMIT),
            (64, 10, 10, 10, FinishReason.MAX_TOKENS),
            (200, 10, 146, 10, FinishReason.MAX_TOKENS),
            (64, 1, 1, 1, FinishReason.MAX_TOKENS),
            (64, 32, 32, 32, FinishReason.MAX_TOKENS),
            (64, 33, 32, 32, FinishReason.CONTEXT_LIMIT),
        ],
    )
    def test_a_prompt_that_leaves_no_room_loses_its_oldest_tokens(
        self, prompt_len, asked, num_cut, granted, reason
    ):
        """
        A prompt that leaves no room loses as many of its oldest tokens as make room for what was
        asked, up to half of max_model_len, and its output is right for the rest.
        """
        rig, new = rig_of(), new_request(prompt_len, asked)
        accepted = submit(rig, new)
        assert Acceptance(num_truncated_tokens=num_cut, max_tokens=granted) == accepted
        rig.run()
        assert expected_outputs(new.prompt[num_cut:], granted, set()) == rig.outputs[0]
        assert (prompt_len - num_cut, reason) == (
            rig.ended[0].num_prompt_tokens, rig.ended[0].reason,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("changes", "error"),
        [({"max_model_len": 1}, TotalTooLong), ({"max_num_blocks": 1}, NeverFits)],
    )
    def test_where_only_one_token_fits_nothing_is_taken(self, changes, error):
        """
        A request that no cut leaves an output token is refused, and does not wait for ever.
        """
        rig = rig_of(block_size=1, memory_threshold=1.0, **changes)
        for prompt_len in (1, 5):
            with pytest.raises((error, PromptTooLong)):
                submit(rig, new_request(prompt_len, 1))

    def test_a_small_pool_cuts_too(self):
        """
        A request is cut to what the KV memory holds where that is less than max_model_len.
        """
        rig = rig_of(max_num_blocks=10)
        assert Acceptance(num_truncated_tokens=19, max_tokens=9) == submit(rig, new_request(50, 9))
        rig.run()
        assert 9 == len(rig.outputs[0])

    def test_the_threshold_cuts_too(self):
        """
        A prompt is cut to the share of memory that memory_threshold leaves to prompts.
        """
        rig = rig_of(max_num_blocks=10, memory_threshold=0.5)
        assert Acceptance(num_truncated_tokens=30, max_tokens=9) == submit(rig, new_request(50, 9))
        rig.run()
        assert 9 == len(rig.outputs[0])

    def test_nothing_is_cut_for_a_threshold_of_zero(self):
        """
        A request is refused where no prompt is ever admitted, since cutting does not help.
        """
        with pytest.raises(NeverFits, match="memory_threshold"):
            submit(rig_of(memory_threshold=0.0), new_request(5, 5))

    def test_digests_of_a_prompt_that_stays_whole_are_used(self):
        """
        The digests that came with a prompt are not computed again where nothing is cut.
        """
        rig, digests = rig_of(), [bytes([number]) * 32 for number in range(15)]
        submit(rig, new_request(60, 100, block_digests=b"".join(digests)))
        rig.step()
        assert digests == rig.core._cell.requests._by_handle[0].prefix.digests

    def test_digests_of_the_uncut_prompt_are_not_used(self):
        """
        A prompt that was cut shares KV with its own tokens and with no others, since other tokens
        stand in each block and the given digests name nothing.
        """
        rig = rig_of(max_model_len=66)
        whole = np.arange(67, dtype=np.int32) % 50
        # As many as of the cut prompt, so that their number does not give them away.
        digests = block_digests(whole, 4)
        accepted = submit(rig, new_request(67, 1, prompt=whole, block_digests=digests))
        assert 2 == accepted.num_truncated_tokens
        rig.run()
        submit(rig, new_request(16, 2, request_id="start", handle=1, prompt=whole[:16]))
        submit(rig, new_request(32, 2, request_id="kept", handle=2, prompt=whole[2:34]))
        rig.run()
        assert (0, 31) == (rig.ended[1].num_cached_tokens, rig.ended[2].num_cached_tokens)
        for handle in (1, 2):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_every_choice_is_cut_alike(self):
        """
        All choices of a request run on the same cut prompt.
        """
        rig = rig_of()
        accepted = submit(rig, new_request(70, 5, num_choices=3))
        assert Acceptance(num_truncated_tokens=11, max_tokens=5) == accepted
        rig.run()
        assert [59] * 3 == [rig.ended[handle].num_prompt_tokens for handle in range(3)]

    @pytest.mark.slow
    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 150), st.integers(1, 150), st.integers(3, 40),
        st.sampled_from([0.3, 0.6, 0.9, 1.0]),
    )  # fmt: skip
    def test_any_length_is_served(self, prompt_len, max_tokens, num_blocks, threshold):
        """
        A request of any length is taken, cut by no more than it must be, and served.
        """
        rig = rig_of(max_num_blocks=num_blocks, memory_threshold=threshold)
        new = new_request(prompt_len, max_tokens)
        if int(threshold * num_blocks) == 0:
            with pytest.raises(NeverFits):
                submit(rig, new)
            return
        accepted = submit(rig, new)
        longest = min(64, 4 * num_blocks)
        room = 4 * int(threshold * num_blocks)
        if prompt_len >= longest:
            room = min(room, longest - min(max_tokens, longest // 2))
        assert max(prompt_len - room, 0) == accepted.num_truncated_tokens
        kept = prompt_len - accepted.num_truncated_tokens
        assert min(max_tokens, longest - kept) == accepted.max_tokens
        rig.run()
        cut = new.prompt[accepted.num_truncated_tokens :]
        assert expected_outputs(cut, accepted.max_tokens, set()) == rig.outputs[0]
