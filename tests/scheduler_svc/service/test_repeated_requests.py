"""Requests that are sent again, with prior outputs and with an idempotency key."""

import numpy as np
import pytest

from scheduler_svc.core.request.request import FinishReason
from tests.scheduler_svc.service.fakes.arithmetic_runner import expected_outputs

KEY = {"attempt_key": "k", "fingerprint": b"f", "seed": 4}


def _raw(*outputs: list[int]) -> tuple[bytes, ...]:
    return tuple(np.array(ids, "<i4").tobytes() for ids in outputs)


def _num_keys(bench) -> int:
    return len(bench.loop._state.keys)


class TestResume:
    def test_tokens_go_on_after_those_the_client_has(self, bench):
        """
        A request that comes with prior outputs gets the tokens that follow them, with their
        offsets, and one end.
        """
        frontend = bench.frontend()
        expected = expected_outputs([5, 6, 7], 10)
        frontend.tokens[1] = expected[:4]
        frontend.submit(1, [5, 6, 7], 10, prior_outputs=_raw(expected[:4]))
        bench.until(lambda: 1 in frontend.ended)
        assert expected == frontend.tokens[1]
        end = frontend.ended[1]
        assert (FinishReason.MAX_TOKENS, 3, 10) == (
            end.reason,
            end.num_prompt_tokens,
            end.num_output_tokens,
        )

    def test_finished_choice_gets_nothing(self, bench):
        """A finished choice of a resumed request is not computed and gets no message."""
        frontend = bench.frontend()
        prior = _raw([], [9, 9], [])
        frontend.submit(
            1, [5, 6], 4, num_choices=3, prior_outputs=prior, finished_choices=(1,), temperature=1.0
        )
        bench.until(lambda: {1, 3} <= set(frontend.ended))
        assert {1, 3} == set(frontend.ended) == set(frontend.tokens)
        assert {0: set()} == bench.loop._state.handles

    def test_request_that_was_over_is_only_accepted(self, bench):
        """A resumed request with all choices finished is accepted, and nothing is computed."""
        frontend = bench.frontend()
        frontend.submit(1, [5, 6], 2, prior_outputs=_raw([7, 8]), finished_choices=(0,), **KEY)
        bench.until(lambda: 1 in frontend.accepted)
        assert (0, 0) == (bench.loop._state.num_requests, _num_keys(bench))


class TestIdempotencyKey:
    def test_repeated_request_ends_the_one_before(self, bench):
        """
        The live request with the key ends SUPERSEDED, whichever frontend has it; the new one runs to
        its end.
        """
        first, second = bench.frontend(0), bench.frontend(1)
        bench.link.is_holding = True
        first.submit(1, [5, 6], 6, **KEY)
        bench.until(lambda: 1 in first.accepted)
        second.submit(1, [5, 6], 6, **KEY)
        bench.until(lambda: 1 in first.ended and 1 in second.accepted)
        assert FinishReason.SUPERSEDED == first.ended[1].reason
        assert 1 == bench.loop._state.num_requests == _num_keys(bench)
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: 1 in second.ended)
        assert expected_outputs([5, 6], 6) == second.tokens[1]
        assert 0 == _num_keys(bench)

    def test_own_id_and_place_are_free_for_the_repetition(self, make_bench):
        """
        A full server takes a repetition under the same request_id, since it first ends the request
        before.
        """
        bench = make_bench(max_num_seqs=1)
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        bench.link.is_holding = True
        for stream_id in (1, 2):
            frontend.submit(stream_id, [5, 6], 6, request_id="mine", **KEY)
        bench.until(lambda: 2 in frontend.accepted and 1 in frontend.ended)
        assert FinishReason.SUPERSEDED == frontend.ended[1].reason

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"fingerprint": b"g"}, "prompt or parameters"),
            ({"seed": 5, "is_seed_given": True}, "seed"),
        ],
        ids=["fingerprint", "seed"],
    )
    def test_other_request_with_the_key_is_refused(self, bench, changes, what):
        """
        Another prompt, other parameters or another given seed are INVALID_ARGUMENT; the live
        request goes on, and its id is not revealed.
        """
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5, 6], 6, **KEY)
        frontend.submit(2, [5, 6], 6, **KEY | changes)
        bench.until(lambda: 2 in frontend.refused)
        refusal = frontend.refused[2]
        assert ("INVALID_PARAMETER", "attempt_key") == (refusal.reason, refusal.field)
        assert what in refusal.message
        assert {} == refusal.metadata
        assert "0-1" not in refusal.message
        bench.link.is_holding = False
        bench.link.compute()
        bench.until(lambda: 1 in frontend.ended)
        assert expected_outputs([5, 6], 6) == frontend.tokens[1]

    @pytest.mark.parametrize(
        "changes",
        [{"seed": 5}, {"seed": 4, "is_seed_given": True}],
        ids=["both chosen", "same given"],
    )
    def test_seed_that_the_server_chose_may_differ(self, bench, changes):
        """A repetition without a seed, or with that of the live request, is the same request."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5, 6], 6, **KEY)
        frontend.submit(2, [5, 6], 6, **KEY | changes)
        bench.until(lambda: 2 in frontend.accepted and 1 in frontend.ended)
        assert FinishReason.SUPERSEDED == frontend.ended[1].reason

    def test_key_is_of_one_tenant(self, bench):
        """Different tenants may use the same key."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        for stream_id, tenant in enumerate(("", "a", "b")):
            frontend.submit(
                stream_id,
                [5, stream_id],
                6,
                tenant=tenant,
                **KEY | {"fingerprint": tenant.encode()},
            )
        bench.until(lambda: len(frontend.accepted) == 3)
        assert ({}, 3) == (frontend.ended, _num_keys(bench))

    def test_key_lives_as_long_as_a_choice(self, bench):
        """
        A key is held until the last choice of its request ended, and is then free for other
        requests.
        """
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5, 6], 6, num_choices=2, temperature=1.0, **KEY)
        bench.until(lambda: 1 in frontend.accepted)
        frontend.end(1)
        bench.until(lambda: 1 in frontend.ended)
        assert 1 == _num_keys(bench)
        frontend.submit(3, [9], 6, **KEY | {"fingerprint": b"g"})
        bench.until(lambda: 3 in frontend.refused)
        frontend.end(2)
        bench.until(lambda: 2 in frontend.ended)
        assert 0 == _num_keys(bench)
        frontend.submit(4, [9], 6, **KEY | {"fingerprint": b"g"})
        bench.until(lambda: 4 in frontend.accepted)

    def test_key_is_free_as_soon_as_its_request_was_cancelled(self, bench):
        """A cancellation and another request with its key may come in the same turn."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5, 6], 6, **KEY)
        bench.until(lambda: 1 in frontend.accepted)
        frontend.end(1)
        frontend.submit(2, [9], 6, **KEY | {"fingerprint": b"g"})
        bench.until(lambda: 2 in frontend.accepted or frontend.refused)
        assert {} == frontend.refused

    def test_frontend_that_dies_takes_its_keys_along(self, bench):
        """Keys of a frontend that is gone are free."""
        first, second = bench.frontend(0), bench.frontend(1)
        bench.link.is_holding = True
        first.submit(1, [5, 6], 6, **KEY)
        bench.until(lambda: 1 in first.accepted)
        bench.loop.frontend_died(0)
        bench.until(lambda: _num_keys(bench) == 0)
        second.submit(1, [9], 6, **KEY | {"fingerprint": b"g"})
        bench.until(lambda: 1 in second.accepted)

    def test_refused_request_holds_no_key(self, bench):
        """A request that was refused holds no key."""
        frontend = bench.frontend()
        frontend.submit(1, [5, 6], 100_000, **KEY)
        bench.until(lambda: 1 in frontend.refused)
        assert 0 == _num_keys(bench)
