"""Clients in other languages have stubs from the protos alone."""

from __future__ import annotations

import os

import pytest

from tests.contract.languages.stubs import (
    LANGUAGES,
    PROTOS,
    StubsError,
    ToolMissing,
    declared,
    make_stubs,
    missing,
)


def skip_or_fail_if_missing(language: str) -> None:
    """Skip the test, saying so, where a toolchain is missing; with CI set it fails instead."""
    skip_or_fail(missing(language))


def skip_or_fail(why: str) -> None:
    """Skip the test for a reason, if there is one; with CI set it fails instead."""
    if why and not os.environ.get("CI"):
        pytest.skip(f"NOT TESTED: {why}")
    assert "" == why


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestStubs:
    @pytest.mark.parametrize("language", LANGUAGES)
    def test_all_messages_and_services_are_generated_and_compile(self, language, tmp_path):
        """
        Each message and service of the contract is generated once, and all compile with a client.
        """
        skip_or_fail_if_missing(language)
        try:
            stubs = make_stubs(language, tmp_path)
        except ToolMissing as error:
            skip_or_fail(str(error))
        known = LANGUAGES[language]
        assert declared("message") == stubs.messages
        assert (declared("service") if known.service else {}) == stubs.services
        assert (known.compile is not None) == stubs.is_compiled

    def test_program_that_the_stubs_do_not_fit_is_refused(self, tmp_path, monkeypatch):
        """
        A client that uses a field which the contract lacks does not compile.
        """
        skip_or_fail_if_missing("typescript")
        programs = tmp_path / "programs/typescript"
        stubs = "tests.contract.languages.stubs"
        source = PROTOS.parent / "tests/contract/languages/typescript"
        programs.mkdir(parents=True)
        for file in source.iterdir():
            text = file.read_text().replace("started.requestId", "started.requestName")
            (programs / file.name).write_text(text)
        monkeypatch.setattr(f"{stubs}.PROGRAMS", programs.parent)
        (tmp_path / "built").mkdir()
        with pytest.raises(StubsError, match="requestName"):
            make_stubs("typescript", tmp_path / "built")
