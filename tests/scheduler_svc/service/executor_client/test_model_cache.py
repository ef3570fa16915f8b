import hashlib
from pathlib import Path

import pytest

from scheduler_svc.executor_client import model_cache
from scheduler_svc.executor_client.model_cache import ModelCache
from tandem.errors import IncompatibleExecutor, InternalError
from tandem.executor.v1.executor_service_pb2 import GetTokenizerResponse


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models")


def _chunk(name: str, content: bytes, whole: bytes | None = None) -> GetTokenizerResponse:
    sha256 = "" if whole is None else hashlib.sha256(whole).hexdigest()
    return GetTokenizerResponse(name=name, chunk=content, sha256=sha256)


class TestModelCache:
    def test_files_are_whole_and_private(self, cache):
        """Chunks become files in a folder that only this user may enter."""
        folder = cache.store(
            "f", [_chunk("a", b"12"), _chunk("a", b"3", b"123"), _chunk("b", b"", b"")]
        )
        assert {"a": b"123", "b": b""} == {
            file.name: file.read_bytes() for file in folder.iterdir()
        }
        assert folder.stat().st_mode & 0o077 == 0
        assert folder == cache.find("f")
        assert cache.find("g") is None

    @pytest.mark.parametrize(
        ("chunks", "text"),
        [
            ([_chunk("a", b"12")], "sent a without its end"),
            ([_chunk("a", b"12"), _chunk("b", b"", b"")], "sent a without its end"),
            ([_chunk("a", b"12", b"13")], "a does not match its checksum"),
            ([_chunk("../a", b"", b"")], "file named '../a'"),
            ([_chunk("", b"", b"")], "file named ''"),
            ([_chunk(".hidden", b"", b"")], "file named '.hidden'"),
        ],
    )
    def test_damaged_transfer_leaves_nothing(self, cache, chunks, text):
        """A transfer that is cut off, damaged or oddly named is refused and not kept."""
        with pytest.raises(IncompatibleExecutor) as caught:
            cache.store("f", chunks)
        assert text in caught.value.message
        assert cache.find("f") is None

    def test_file_without_end_does_not_fill_the_disk(self, cache, monkeypatch):
        """A file over the limit is refused before it is written in full."""
        monkeypatch.setattr(model_cache, "MAX_FILE_BYTES", 10)
        with pytest.raises(IncompatibleExecutor, match="over 10 bytes"):
            cache.store("f", (_chunk("a", b"12345") for _ in range(3)))

    def test_place_that_cannot_be_written_is_an_error_with_advice(self, tmp_path):
        """A place that cannot be written to is a typed error that names it."""
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(InternalError, match=r"cannot be written to .*file/models: Not a dir"):
            ModelCache(tmp_path / "file/models").store("f", [_chunk("a", b"1", b"1")])
