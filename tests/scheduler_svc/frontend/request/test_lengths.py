"""The fit of prompt and output into max_model_len, refused or cut."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.request.lengths import Fit, fit_lengths
from tandem.errors import EmptyPrompt, PromptTooLong, TandemError, TotalTooLong
from tests.scheduler_svc.frontend.fake_core import model

MODEL = model(Path("/nowhere"))
CUTTING = model(Path("/nowhere"), truncates=True)


class TestRefusing:
    @pytest.mark.parametrize(
        ("prompt_len", "max_tokens", "resolved"),
        [(10, None, 100), (200, None, 56), (255, None, 1), (255, 1, 1), (1, 255, 255)],
    )
    def test_request_that_fits_gets_its_max_tokens(self, prompt_len, max_tokens, resolved):
        """
        A request without max_tokens gets 100 or what is left of max_model_len.
        """
        found = fit_lengths(prompt_len, max_tokens, MODEL, prompt_field="text")
        assert (resolved, 0) == (found.max_tokens, found.num_dropped)

    @pytest.mark.parametrize(
        ("prompt_len", "kv_tokens", "resolved"),
        [(10, None, 246), (10, 64, 54), (255, None, 1), (63, 64, 1), (64, 64, 192), (100, 64, 156)],
    )
    def test_chat_without_max_tokens_goes_on_until_the_context_ends(
        self, prompt_len, kv_tokens, resolved
    ):
        """
        A chat's default max_tokens is all that max_model_len has left, or the KV cache if that has
        less; the KV cache limits no prompt.
        """
        served = model(Path("/nowhere"), kv_tokens=kv_tokens)
        found = fit_lengths(prompt_len, None, served, prompt_field="text", is_chat=True)
        assert Fit(max_tokens=resolved, fills_context=True) == found

    def test_text_without_max_tokens_is_bound_by_the_kv_memory(self):
        """
        A text's default of 100 is lowered to the KV cache, a max_tokens that was asked for is not.
        """
        served = model(Path("/nowhere"), kv_tokens=64)
        assert 54 == fit_lengths(10, None, served, prompt_field="text").max_tokens
        assert 60 == fit_lengths(10, 60, served, prompt_field="text").max_tokens

    @pytest.mark.parametrize(
        ("prompt_len", "max_tokens", "error", "path", "sentence"),
        [
            (0, None, EmptyPrompt, "text", "the prompt has no token."),
            (
                257,
                None,
                PromptTooLong,
                "text",
                "the prompt has 257 tokens, but max_model_len is 256.",
            ),
            (
                256,
                None,
                TotalTooLong,
                "stopping.max_tokens",
                (
                    "the prompt has 256 tokens and max_tokens is 1, together 257, "
                    "but max_model_len is 256."
                ),
            ),
            (
                1,
                256,
                TotalTooLong,
                "stopping.max_tokens",
                (
                    "the prompt has 1 token and max_tokens is 256, together 257, "
                    "but max_model_len is 256."
                ),
            ),
            (
                100,
                157,
                TotalTooLong,
                "stopping.max_tokens",
                (
                    "the prompt has 100 tokens and max_tokens is 157, together 257, "
                    "but max_model_len is 256."
                ),
            ),
        ],
    )
    def test_request_that_cannot_fit_is_refused(
        self, prompt_len, max_tokens, error: type[TandemError], path, sentence
    ):
        """
        A prompt and output one token over max_model_len are refused with both lengths.
        """
        with pytest.raises(error) as caught:
            fit_lengths(prompt_len, max_tokens, MODEL, prompt_field="text")
        assert (path, sentence) == (caught.value.field, caught.value.message)


class TestTruncating:
    @pytest.mark.parametrize(
        ("prompt_len", "max_tokens", "fit"),
        [
            (100, 156, Fit(max_tokens=156)),
            (100, 157, Fit(max_tokens=156, fills_context=True)),
            (255, 100, Fit(max_tokens=1, fills_context=True)),
            (256, 100, Fit(max_tokens=100, num_dropped=100)),
            (1000, None, Fit(max_tokens=100, num_dropped=844)),
            (1000, 5000, Fit(max_tokens=128, num_dropped=872, fills_context=True)),
        ],
    )
    def test_output_is_cut_before_the_prompt(self, prompt_len, max_tokens, fit):
        """
        The value of max_tokens is lowered if one token has room; else the prompt loses its oldest
        tokens.
        """
        assert fit == fit_lengths(prompt_len, max_tokens, CUTTING, prompt_field="text")

    def test_chat_that_is_cut_leaves_room_for_as_much_as_a_text(self):
        """
        A chat over max_model_len loses its oldest tokens until an answer of 100 has room.
        """
        found = fit_lengths(1000, None, CUTTING, prompt_field="text", is_chat=True)
        assert (100, 844) == (found.max_tokens, found.num_dropped)

    @given(
        prompt_len=st.integers(1, 2000),
        max_tokens=st.none() | st.integers(1, 2000),
        longest=st.integers(2, 600),
    )
    def test_every_request_fits_afterwards(self, prompt_len, max_tokens, longest):
        """
        A prompt and output that were cut have at least one token each and fit into max_model_len.
        """
        cutting = model(Path("/nowhere"), truncates=True, max_model_len=longest)
        fit = fit_lengths(prompt_len, max_tokens, cutting, prompt_field="text")
        kept = prompt_len - fit.num_dropped
        assert 1 <= kept <= prompt_len
        assert 1 <= fit.max_tokens <= (max_tokens or 100)
        assert kept + fit.max_tokens <= longest
        assert fit.num_dropped == 0 or prompt_len >= longest
