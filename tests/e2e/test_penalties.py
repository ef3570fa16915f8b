"""Penalties and log probabilities as clients see them, from real services."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.errors import InvalidParameter
from tandem_client import Delta, FinishReason
from tests.waiting import wait_until

OPTIONS = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8, "seed": 11}
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_p": 0.02}
LOGPROB_NOISE = 1e-3
"""
Noise between two ways of computing the same float32 logits, over a few hundred terms of a sum.
"""


class TestPenalties:
    @pytest.mark.slow
    def test_frequency_penalty_ends_repetition(self, small):
        """
        A frequency penalty stops the repetition of a token that a bias would repeat forever.
        """
        biased = {"logit_bias": {65: 12.0}, "temperature": 0.0, "max_tokens": 24}
        with small.client() as client:
            plain = client.complete("hello", ignore_eos=True, **biased)
            varied = client.complete("hello", ignore_eos=True, frequency_penalty=2.0, **biased)
        assert [65] * 24 == list(plain.token_ids)
        assert 12 > varied.token_ids.count(65) > 0

    def test_neighbours_do_not_matter(self, small):
        """
        A request with penalties gets the same tokens alone and beside others with and without
        penalties.
        """
        with small.client() as client, ThreadPoolExecutor(4) as pool:
            alone = client.complete("hello", **OPTIONS, **PENALTIES)
            with small.held():
                again, *others = [
                    pool.submit(client.complete, prompt, **OPTIONS, **penalties)
                    for prompt, penalties in (
                        ("hello", PENALTIES),
                        ("hello 0", {}),
                        ("hello 1", PENALTIES),
                        ("hello 2", {}),
                    )
                ]
                wait_until(lambda: small.num_requests() == 4, "all of them at once")
            for other in others:
                assert 24 == len(other.result().token_ids)
            assert alone.token_ids == again.result().token_ids

    def test_nothing_ends_before_min_tokens(self, small):
        """
        Ids that would end an output at once end it with the first token after min_tokens.
        """
        ends = list(range(3, 60))
        biases = dict.fromkeys(ends, 50.0)
        with small.client() as client:
            early = client.complete("hello", stop_token_ids=ends, logit_bias=biases)
            held = client.complete("hello", stop_token_ids=ends, logit_bias=biases, min_tokens=7)
        assert (1, 8) == (len(early.token_ids), len(held.token_ids))
        assert FinishReason.STOP_TOKEN == held.reason

    def test_only_allowed_ids_are_drawn(self, small):
        """
        Outputs have the allowed ids alone, in the same order beside others, and the log
        probabilities of the model over all ids; the client is told the ids in order.
        """
        confined = {"allowed_token_ids": [90, 65, 70, 65], "logprobs": 3, **OPTIONS}
        with small.client() as client, ThreadPoolExecutor(2) as pool:
            alone = client.complete("hello", **confined)
            free = client.complete("hello", logprobs=3, **OPTIONS)
            with small.held():
                tasks = [
                    pool.submit(client.complete, "hello", **options)
                    for options in (confined, OPTIONS)
                ]
                wait_until(lambda: small.num_requests() == 2, "both of them at once")
            beside = [task.result() for task in tasks]
        assert (65, 70, 90) == alone.params.allowed_token_ids
        assert {65, 70, 90} >= set(alone.token_ids)
        assert [alone.token_ids, free.token_ids] == [one.token_ids for one in beside]
        first, unconfined = alone.logprobs[0].top, free.logprobs[0].top
        assert [one for one, _ in first] == [one for one, _ in unconfined]
        assert [value for _, value in unconfined] == pytest.approx(
            [value for _, value in first], abs=LOGPROB_NOISE
        )

    def test_end_is_drawn_only_where_it_is_allowed(self, small):
        """
        An output whose allowed ids do not end it runs to max_tokens; one whose do may end.
        """
        ends = {"stop_token_ids": [66], "temperature": 0.0, "max_tokens": 9}
        bias = {"logit_bias": {66: 100.0}}
        with small.client() as client:
            kept = client.complete("hello", allowed_token_ids=[65], **ends, **bias)
            ended = client.complete("hello", allowed_token_ids=[65, 66], **ends, **bias)
        assert ((65,) * 9, (66,)) == (kept.token_ids, ended.token_ids)

    def test_what_ended_the_output_stays_where_it_is_asked_for(self, small):
        """
        With include_stop the text ends with the stop string, or with the stop token's text, and
        the ids are the same.
        """
        options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
        with small.client() as client:
            whole = client.complete("hello", **options)
            stop = whole.text[len(whole.text) // 2 :][:3]
            cut = client.complete("hello", stop=[stop], **options)
            kept = client.complete("hello", stop=[stop], include_stop=True, **options)
            last = {"stop_token_ids": [whole.token_ids[0]], **options}
            bare = client.complete("hello", **last)
            told = client.complete("hello", include_stop=True, logprobs=0, **last)
        assert cut.text + stop == kept.text
        assert (cut.token_ids, cut.reason) == (kept.token_ids, kept.reason)
        assert ("", told.logprobs[0].text) == (bare.text, told.text)
        assert bare.token_ids == told.token_ids
        assert FinishReason.STOP_TOKEN == told.reason

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"allowed_token_ids": [3, 10**6]}, "sampling.allowed_token_ids[1]"),
            ({"allowed_token_ids": [-1]}, "sampling.allowed_token_ids[0]"),
            ({"allowed_token_ids": [3] * 1025}, "sampling.allowed_token_ids"),
            (
                {"allowed_token_ids": [3], "stop_token_ids": [3, 4], "min_tokens": 1},
                "sampling.allowed_token_ids",
            ),
            ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
            ({"frequency_penalty": 3.0}, "sampling.frequency_penalty"),
            ({"min_p": 1.5}, "sampling.min_p"),
            ({"min_tokens": 30, "max_tokens": 20}, "stopping.min_tokens"),
            ({"logit_bias": {10**6: 1.0}}, "sampling.logit_bias[1000000]"),
            ({"logprobs": 21}, "response.logprobs"),
        ],
        ids=str,
    )
    def test_bad_value_is_refused_with_its_field(self, small, options, field):
        """
        A parameter out of range is INVALID_ARGUMENT with its path.
        """
        with small.client() as client, pytest.raises(InvalidParameter) as refused:
            list(client.generate("hello", **options))
        assert (field, "INVALID_ARGUMENT") == (refused.value.field, refused.value.code)


class TestLogprobs:
    def test_stream_and_completion_tell_the_same(self, small):
        """
        Every Delta has one entry per id; together these are the entries of Complete, and
        probabilities.
        """
        with small.client() as client:
            whole = client.complete("hello", logprobs=4, **OPTIONS, **PENALTIES)
            entries, ids = [], []
            for event in client.generate("hello", logprobs=4, **OPTIONS, **PENALTIES):
                if isinstance(event, Delta):
                    assert len(event.token_ids) == len(event.logprobs)
                    entries += event.logprobs
                    ids += event.token_ids
        assert list(whole.token_ids) == ids
        for one, other in zip(whole.logprobs, entries, strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=LOGPROB_NOISE)
            values = [value for _, value in one.top]
            assert values == sorted(values, reverse=True)
            assert len(values) == 4
            assert sum(map(math.exp, values)) <= 1 + 1e-3

    def test_requested_ids_are_told_at_every_place(self, small):
        """
        Each token comes with the log probabilities of the named ids, in their order, which are
        those that a likeliest id has among the likeliest.
        """
        options = OPTIONS | {"logprobs": 3, "token_bytes": True}
        with small.client() as client:
            plain = client.complete("hello", **options)
            ids = [plain.logprobs[0].top[2][0], 65, plain.logprobs[0].top[0][0]]
            told = client.complete("hello", logprob_token_ids=ids, **options)
        assert plain.token_ids == told.token_ids
        assert [3] * 24 == [len(one.requested) for one in told.logprobs]
        top = plain.logprobs[0].top
        assert [top[2][1], top[0][1]] == pytest.approx(
            told.logprobs[0].requested[::2], abs=LOGPROB_NOISE
        )
        assert [one.top for one in plain.logprobs] == [one.top for one in told.logprobs]
        assert [one.top_token_bytes for one in plain.logprobs] == [
            one.top_token_bytes for one in told.logprobs
        ]

    def test_best_token_of_a_greedy_request_is_its_own(self, small):
        """
        The greedy token without penalties is the likeliest, and its two log probabilities are
        equal.
        """
        greedy = OPTIONS | {"temperature": 0.0}
        with small.client() as client:
            found = client.complete("hello", logprobs=1, **greedy)
        for token_id, one in zip(found.token_ids, found.logprobs, strict=True):
            assert ((token_id, one.logprob),) == one.top

    def test_zero_and_unset_differ(self, small):
        """
        A request with logprobs 0 gets those of the chosen tokens alone, one with logprobs unset
        gets none.
        """
        with small.client() as client:
            alone = client.complete("hello", logprobs=0, **OPTIONS)
            unset = client.complete("hello", **OPTIONS)
        assert {()} == {one.top for one in alone.logprobs}
        assert len(alone.token_ids) == len(alone.logprobs)
        assert () == unset.logprobs
