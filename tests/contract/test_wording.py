"""Words that messages share."""

from __future__ import annotations

import pytest

from tandem.wording import GIB, counted, gib, nearest


class TestCounted:
    @pytest.mark.parametrize(
        ("number", "expected"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens")]
    )
    def test_noun_follows_the_number(self, number, expected):
        """
        One thing is counted in the singular, any other number in the plural.
        """
        assert expected == counted(number, "token")


class TestGib:
    @pytest.mark.parametrize(
        ("num_bytes", "form", "expected"),
        [
            (3 * GIB // 2, (), "1.50"),
            (3 * GIB // 2, (".1f",), "1.5"),
            (GIB // 512, (".2g",), "0.002"),
        ],
    )
    def test_bytes_are_counted_in_gib(self, num_bytes, form, expected):
        """
        A size is given in GiB with two decimals, or as the format says.
        """
        assert expected == gib(num_bytes, *form)


class TestNearest:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [("temprature", "temperature"), ("top-k", "top_k"), ("beams", None), ("", None)],
    )
    def test_most_similar_name_is_found(self, name, expected):
        """
        A misspelt name leads to the one that it most likely means, and a strange one to none.
        """
        assert expected == nearest(name, {"temperature": 1, "top_k": 2, "top_p": 3})

    def test_similarity_can_be_demanded(self):
        """
        A name that is less alike than asked for is not suggested.
        """
        assert "--block-size" == nearest("--blok-size", ["--block-size"], least_alike=0.9)
        assert nearest("--size", ["--block-size"], least_alike=0.9) is None
