"""Synthetic workloads have the statistics they promise."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from tandem.errors import InvalidConfig
from tandem_simulator.executor.model_tokens import FIRST_ID, VOCAB_SIZE
from tandem_simulator.workload.ask import random_ids
from tandem_simulator.workload.distributions import Arrivals, Lengths, zipf_ranks
from tandem_simulator.workload.synthetic import PRESETS, Synthetic, Workload

COUNT = 20_000
"""Number of draws, of one seed; tolerances are several standard errors of so many."""


def rng():
    return np.random.Generator(np.random.PCG64(7))


def draw(text, count=COUNT):
    return Lengths.parse(text).draw(rng(), count)


class TestLengths:
    def test_fixed_and_uniform_cover_their_range(self):
        """
        A number is every length; uniform lengths reach both ends and average the middle.
        """
        lengths = draw("uniform:3:9")
        assert (draw("12") == 12).all()
        assert {3, 4, 5, 6, 7, 8, 9} == set(lengths.tolist())
        assert 6.0 == pytest.approx(lengths.mean(), rel=0.02)  # 8 standard errors

    def test_lognormal_has_its_mean_and_spread(self):
        """
        The mean is the one asked for, the logarithm spreads by sigma, and nothing is over the
        maximum.
        """
        lengths = draw("lognormal:400:0.8:1000000")
        assert 400 == pytest.approx(lengths.mean(), rel=0.03)  # 4 standard errors
        assert 0.8 == pytest.approx(np.log(lengths).std(), rel=0.03)  # 6 standard errors
        assert 500 == draw("lognormal:400:0.8:500").max()

    def test_zipf_halves_with_the_rank(self):
        """
        Length 2 is 2^-exponent times as frequent as length 1.
        """
        counts = np.bincount(draw("zipf:1:64"))
        # 4 standard errors of about 4,200 and 2,100 draws.
        assert 0.5 == pytest.approx(counts[2] / counts[1], rel=0.1)
        assert 1 == draw("zipf:2.5:64").min()
        assert 64 >= draw("zipf:0.5:64").max()

    @pytest.mark.parametrize(
        "text",
        ["", "short", "normal:3:4", "fixed:0", "fixed:1.5", "uniform:9:3", "uniform:3",
         "lognormal:100:0:500", "lognormal:nan:1:5", "zipf:-1:5", "fixed:1:2", "lognormal:5"],
    )  # fmt: skip
    def test_bad_text_is_refused(self, text):
        """
        A text that is no distribution is an error that shows it.
        """
        with pytest.raises(InvalidConfig, match=repr(text)):
            Lengths.parse(text)

    @pytest.mark.parametrize("text", ["fixed:7", "uniform:1:9", "lognormal:4:0.5:90", "zipf:1.2:8"])
    def test_text_reads_back(self, text):
        """
        A distribution prints as the text it is read from.
        """
        assert text == str(Lengths.parse(text))


class TestArrivals:
    @pytest.mark.parametrize("text", ["poisson", "constant", "gamma:3", "bursts:5"])
    def test_rate_is_kept(self, text):
        """
        Every process has the rate it is asked for and never goes back.
        """
        times = Arrivals.parse(text).draw(rng(), COUNT, 8.0)
        assert COUNT == len(times)
        # 5 standard errors where gaps vary by 3, the most.
        assert 8.0 == pytest.approx(COUNT / times[-1], rel=0.1)
        assert (np.diff(times) >= 0).all()

    def test_burstiness_is_as_asked(self):
        """
        Gaps vary by the coefficient asked for; 1 is Poisson, 0 evenly spaced.
        """
        spreads = {
            text: np.std(gaps) / np.mean(gaps)
            for text in ("poisson", "constant", "gamma:3", "gamma:0.5")
            for gaps in [np.diff(Arrivals.parse(text).draw(rng(), COUNT, 8.0))]
        }
        expected = {"poisson": 1.0, "constant": 0.0, "gamma:3": 3.0, "gamma:0.5": 0.5}
        # 4 standard errors where gaps vary by 3; sums of equal gaps round in the last digits.
        assert expected == pytest.approx(spreads, rel=0.1, abs=1e-9)

    def test_bursts_arrive_together(self):
        """
        Bursts have the mean size asked for; at-once is one burst at 0.
        """
        times = Arrivals.parse("bursts:5").draw(rng(), COUNT, 8.0)
        # 3 standard errors of about 4,000 bursts.
        assert 5.0 == pytest.approx(COUNT / len(set(times.tolist())), rel=0.05)
        assert [0.0] * 4 == Arrivals.parse("at-once").draw(rng(), 4, 8.0).tolist()

    @pytest.mark.parametrize("text", ["", "never", "poisson:2", "gamma", "gamma:0", "bursts:0.5"])
    def test_bad_text_is_refused(self, text):
        """
        A text that is no process of arrivals is an error that shows it.
        """
        with pytest.raises(InvalidConfig, match=repr(text)):
            Arrivals.parse(text)


class TestTokens:
    def test_ids_are_in_range_and_evenly_spread(self):
        """
        Made-up tokens are ids a prompt may hold, all equally likely.
        """
        ids = random_ids(1, 2, 3, 200_000)
        assert FIRST_ID <= ids.min() < ids.max() < VOCAB_SIZE
        share = np.bincount((ids - FIRST_ID) * 8 // (VOCAB_SIZE - FIRST_ID)) / len(ids)
        np.testing.assert_allclose(share, 1 / 8, rtol=0.03)  # 5 standard errors

    def test_streams_are_unrelated(self):
        """
        Another seed, kind or number gives other tokens; a longer count only goes on.
        """
        first = random_ids(1, 2, 3, 50)
        assert first.tolist() == random_ids(1, 2, 3, 80)[:50].tolist()
        for other in [(0, 2, 3), (1, 1, 3), (1, 2, 4)]:
            assert np.count_nonzero(first == random_ids(*other, 50)) < 5


class TestSynthetic:
    def test_popular_prefixes_are_shared_most(self):
        """
        Requests begin with one of as many prefixes as asked for, the first ones most often.
        """
        workload = Workload(requests=4000, prefix_groups=8, prefix_len=Lengths.parse("32"))
        prompts = [ask.prompt for ask in Synthetic(workload, 0, 8192).opening()]
        counts = {}
        for prompt in prompts:
            counts[prompt[:32].tobytes()] = counts.get(prompt[:32].tobytes(), 0) + 1
        most, second = sorted(counts.values())[-1:-3:-1]
        assert 8 == len(counts)
        # 4 standard errors of about 1,500 and 700 requests.
        assert 0.5 == pytest.approx(second / most, rel=0.2)

    def test_conversations_continue_their_history(self):
        """
        The next turn's prompt is the last one's, its output and new tokens, after a time to think.
        """
        workload = Workload(requests=10, turns=3, prompt_len=Lengths.parse("20"))
        source = Synthetic(workload, 0, 8192)
        opening = list(source.opening())
        outputs = np.array([7, 8, 9], np.int32)
        (second,) = source.follow(opening[0], outputs, 50.0)
        (third,) = source.follow(second, outputs, 90.0)

        assert 4 == len(opening)
        assert [*opening[0].prompt.tolist(), 7, 8, 9] == second.prompt[:23].tolist()
        assert (43, 1, 66, 2) == (len(second.prompt), second.turn, len(third.prompt), third.turn)
        assert second.arrival_s > 50.0
        assert [] == source.follow(third, outputs, 99.0)

    def test_last_conversations_are_the_short_ones(self):
        """
        Turns add up to the number of requests asked for.
        """
        source = Synthetic(Workload(requests=10, turns=3), 0, 100_000)
        asks, outputs = list(source.opening()), np.array([7], np.int32)
        for ask in asks:
            asks += source.follow(ask, outputs, 0.0)
        assert 10 == len(asks) == source.max_handles

    def test_conversation_ends_before_it_cannot_fit(self):
        """
        A turn that would be longer than the model's context is not asked for.
        """
        source = Synthetic(Workload(requests=4, turns=2, max_tokens=50), 0, 120)
        ask = next(source.opening())
        assert [] == source.follow(ask, np.full(80, 7, np.int32), 0.0)

    def test_forked_conversation_goes_on_in_branches_of_one_history(self):
        """
        The first answer of a conversation with forks is followed by a request per branch, each with the whole history
        and tokens of its own; later answers are followed by one of their branch.
        """
        workload = Workload(requests=14, turns=3, forks=3, prompt_len=Lengths.parse("20"))
        source = Synthetic(workload, 0, 8192)
        opening, outputs = list(source.opening()), np.array([7, 8], np.int32)
        branches = source.follow(opening[0], outputs, 5.0)
        (later,) = source.follow(branches[2], outputs, 9.0)

        assert 2 == len(opening)
        assert [0, 1, 2] == [ask.branch for ask in branches]
        assert {(*opening[0].prompt.tolist(), 7, 8)} == {
            tuple(ask.prompt[:22].tolist()) for ask in branches
        }
        assert 3 == len({tuple(ask.prompt.tolist()) for ask in branches})
        assert (2, 2, branches[2].prompt.tolist()) == (
            later.turn,
            later.branch,
            later.prompt[:42].tolist(),
        )

    def test_turns_of_all_branches_add_up_to_the_requests(self):
        """
        Forks are counted among the requests asked for, and the last turns are left out where they do not fit in.
        """
        source = Synthetic(Workload(requests=17, turns=3, forks=2), 0, 100_000)
        asks, outputs = list(source.opening()), np.array([7], np.int32)
        for ask in asks:
            asks += source.follow(ask, outputs, 0.0)
        assert 17 == len(asks) == source.max_handles
        keys = {(ask.conversation, ask.turn, ask.branch) for ask in asks}
        assert 17 == len(keys)

    def test_tenants_and_priorities_are_spread(self):
        """
        Tenants follow their skew, priorities come equally often, and isolated tenants have salts of
        their own.
        """
        workload = Workload(
            requests=6000, tenants=3, tenant_skew=1.0, priorities=2, isolate_tenants=True
        )
        asks = list(Synthetic(workload, 0, 8192).opening())
        shares = [sum(ask.tenant == f"tenant-{i}" for ask in asks) / 6000 for i in range(3)]
        # 4 standard errors of the smallest share, and 8 of a half.
        np.testing.assert_allclose(shares, [6 / 11, 3 / 11, 2 / 11], rtol=0.1)
        assert 0.5 == pytest.approx(sum(ask.priority for ask in asks) / 6000, rel=0.1)
        assert all(ask.cache_salt == ask.tenant.encode() for ask in asks)

    def test_requests_ask_for_what_they_can_tell(self):
        """
        Without slack all ask for max_tokens; with it, for so many times their output, no more.
        """
        base = Workload(requests=50, output_len=Lengths.parse("uniform:1:100"), max_tokens=80)
        slack = dataclasses.replace(base, ask_slack=1.5)
        assert {80} == {ask.max_tokens for ask in Synthetic(base, 0, 8192).opening()}
        asks = list(Synthetic(slack, 0, 8192).opening())
        assert all(min(80, -(-ask.output_len * 3 // 2)) == ask.max_tokens for ask in asks)

    def test_same_seed_gives_the_same_requests(self):
        """
        Two sources with one seed ask the same; another seed asks otherwise.
        """
        first, second, other = (
            [(a.arrival_s, a.prompt.tobytes(), a.output_len) for a in Synthetic(w, s, 8192).opening()]
            for w, s in [(Workload(requests=30), 3), (Workload(requests=30), 3),
                         (Workload(requests=30), 4)]
        )  # fmt: skip
        assert first == second
        assert all(a != b for a, b in zip(first, other, strict=True))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("requests", 0), ("request_rate", 0.0), ("request_rate", float("nan")), ("turns", 0),
         ("forks", 0), ("tenants", 0), ("choices", 0), ("prefix_groups", -1), ("timeout_s", 0.0), ("ask_slack", 0.0),
         ("max_tokens", 0)],
    )  # fmt: skip
    def test_value_out_of_range_is_refused(self, name, value):
        """
        A value that makes no workload is an error that names it.
        """
        with pytest.raises(InvalidConfig, match=name):
            dataclasses.replace(Workload(), **{name: value}).validate()

    def test_presets_fit_their_machines(self):
        """
        No request of a named workload is longer than the context of the larger presets.
        """
        for workload in PRESETS.values():
            source = Synthetic(dataclasses.replace(workload, requests=500), 0, 8192)
            asks = itertools.islice(source.opening(), 500)
            assert max(len(ask.prompt) + ask.max_tokens for ask in asks) <= 8192


class TestZipf:
    def test_no_skew_is_uniform(self):
        """
        With exponent 0 every rank is equally likely, and one rank is the only one.
        """
        counts = np.bincount(zipf_ranks(rng(), COUNT, 4, 0.0))
        np.testing.assert_allclose(counts / COUNT, 0.25, rtol=0.05)  # 4 standard errors
        assert not zipf_ranks(rng(), 10, 1, 1.0).any()
