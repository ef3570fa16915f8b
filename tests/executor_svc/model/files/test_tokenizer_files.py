"""Tokenizer files as they are read at start."""

from __future__ import annotations

import pytest

from executor_svc.model.files.tokenizer_files import read_tokenizer_files
from tandem.errors import InvalidModel


class TestReadTokenizerFiles:
    def test_files_that_are_there_are_read(self, tmp_path):
        """
        Only files that exist are returned, each with its bytes.
        """
        (tmp_path / "tokenizer.json").write_text('{"model": {}}')
        (tmp_path / "config.json").write_text("{}")
        (file,) = read_tokenizer_files(tmp_path)

        assert ("tokenizer.json", b'{"model": {}}') == (file.name, file.content)

    def test_no_tokenizer_is_allowed(self, tmp_path):
        """
        A model without a tokenizer serves token ids.
        """
        assert () == read_tokenizer_files(tmp_path)

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b'{"model": {', "is not valid JSON"),
            (b"\xff\xfe\xff", "is not valid JSON"),
            (b"", "is not valid JSON"),
            (b"{}", "it has no model"),
            (b"[]", "it has no model"),
            (b'{"model": null}', "it has no model"),
        ],
    )
    def test_damaged_tokenizer_is_named(self, tmp_path, content, complaint):
        """
        A tokenizer.json that is cut short or empty of a tokenizer is refused with its path.
        """
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(InvalidModel, match=complaint) as refused:
            read_tokenizer_files(tmp_path)

        assert str(tmp_path / "tokenizer.json") in refused.value.message
