"""Tokenizer files with one thing wrong give a tokenizer that works, or one typed sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.text.tokenizer import TextModel
from tandem.errors import InvalidModel
from tests.broken_json import damaged, damaged_bytes
from tests.scheduler_svc.frontend.small_models import CHATML, llama_like_tokenizer, save_model

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATE = "chat_template.jinja"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a good tokenizer and every file that is read."""
    folder = save_model(tmp_path_factory.mktemp("tokenizer"), llama_like_tokenizer())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = [{"name": "default", "template": CHATML}, {"name": "tools", "template": "x"}]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": templates})
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "<unk>"}}))
    return folder


def load_with(directory: Path, name: str, content: bytes) -> None:
    """Load with one file replaced; check that the tokenizer works, or that the refusal is short."""
    path = directory / name
    good = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    refusal = ""
    try:
        model = TextModel.load(directory)
        ids = model.encode_text("the") if (directory / "tokenizer.json").exists() else []
        detokenizer = model.detokenizer(ids)
        for token_id in ids:
            detokenizer.push(token_id)
    except InvalidModel as error:
        refusal = error.message
    finally:
        path.unlink() if good is None else path.write_bytes(good)
    assert len(refusal.encode()) < 2000


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_wrong_value_loads_or_is_refused(directory: Path, name: str, data: st.DataObject):
    """
    A tokenizer with one value missing or of the wrong kind works or is refused by a typed sentence.
    """
    content = json.loads((directory / name).read_text())
    load_with(directory, name, data.draw(damaged(content)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_wrong_byte_loads_or_is_refused(directory: Path, name: str, data: st.DataObject):
    """
    A tokenizer with a file cut off, or with bytes overwritten, works or is refused by a typed
    sentence.
    """
    load_with(directory, name, data.draw(damaged_bytes((directory / name).read_bytes())))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_damaged_template_loads_or_is_refused(directory: Path, data: st.DataObject):
    """
    A chat template cut off anywhere, or with bytes overwritten, compiles or is refused by a typed
    sentence.
    """
    load_with(directory, TEMPLATE, data.draw(damaged_bytes(CHATML.encode())))


def test_tokenizer_without_tokens_loads_or_is_refused(directory: Path):
    """
    A tokenizer with an empty vocabulary works or is refused by a typed sentence.
    """
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": [], "unk_token": None}
    content["added_tokens"] = []
    load_with(directory, "tokenizer.json", json.dumps(content).encode())
