"""Messages of sampling params, which are kept for params that come again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem import sampling_params
from tandem.errors import SessionLost
from tandem.link.codec.sampling_codec import read_sampling, sampling_message, what_link_refuses
from tandem.sampling_params import SamplingParams

PARAMS = SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    end_ids=(1, 2),
    logit_bias=((5, -0.5),),
    allowed_token_ids=(3, 5),
    logprobs=2,
    logprob_token_ids=(9,),
)


class TestRepeatedParams:
    def test_each_request_keeps_its_own_seed_and_choice(self):
        """Params that are alike but for seed and choice arrive with their own ones."""
        sent = [replace(PARAMS, seed=2**64 - 1 - n, choice=n) for n in (0, 1, 2, 0)]
        messages = [sampling_message(params) for params in sent]
        assert sent == [read_sampling(message, "sampling") for message in messages]

    def test_message_that_is_changed_changes_no_other(self):
        """A change of a message changes none that is made of the same params."""
        changed = sampling_message(PARAMS)
        changed.top_k = 99
        assert PARAMS == read_sampling(sampling_message(PARAMS), "sampling")


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("seed", -1),
            ("seed", 2**64),
            ("seed", 1.5),
            ("choice", -1),
            ("top_k", 7.0),
            ("top_k", 7.5),
            ("temperature", 5.0),
            ("logit_bias", ((5, float("nan")),)),
            ("allowed_token_ids", (3, 3)),
            ("end_ids", (2**31,)),
            ("row_metadata", (("steer", 1.0),)),
        ],
    )
    def test_params_are_refused_however_often_they_come(self, name, value):
        """Params that the other end would refuse are named each time, also after similar ones."""
        assert what_link_refuses(PARAMS) is None
        wrong = replace(PARAMS, **{name: value})
        first = what_link_refuses(wrong)
        assert first is not None
        assert first == what_link_refuses(wrong)
        assert what_link_refuses(PARAMS) is None

    @pytest.mark.parametrize("name", ["seed", "choice"])
    def test_range_of_each_request_s_own_params_counts(self, monkeypatch, name):
        """A range declared for seed or choice holds for the sender as for the other end."""
        below_eight = (lambda value: value < 8, "must be below 8")
        monkeypatch.setitem(sampling_params._RULES, name, (below_eight,))
        fits, wrong = (replace(PARAMS, **{name: value}) for value in (7, 8))
        assert what_link_refuses(fits) is None
        with pytest.raises(SessionLost) as caught:
            read_sampling(sampling_message(wrong), "sampling")
        assert caught.value.message == what_link_refuses(wrong)

    @pytest.mark.parametrize(("name", "most"), [("seed", 2**64 - 1), ("choice", 2**32 - 1)])
    def test_largest_values_of_the_message_are_sent(self, name, most):
        """Every seed and choice that a message can hold is taken, and no larger one is sent."""
        params = replace(PARAMS, **{name: most})
        assert what_link_refuses(params) is None
        assert params == read_sampling(sampling_message(params), "sampling")
        assert what_link_refuses(replace(PARAMS, **{name: most + 1})) is not None
