"""The library of C++ kernels: built once, found again, and missed loudly."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import structlog.testing
import torch

from kernels.cpu_extension import ExtensionUnavailable, build, library
from kernels.cpu_extension import __main__ as command
from kernels.cpu_extension.build import built_library
from kernels.paged_attention import _operation, use_cpu_extension

CPU = torch.device("cpu")

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "compiler $VERSION"; exit 0; fi
echo "$@" >> {log}
sleep {seconds}
while [ "$1" != -o ]; do shift; done
echo "compiled" > "$2"
"""


class Machine:
    """An environment with a script for a compiler, which notes what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.compiler = folder / "compiler"
        self.cache = folder / "cache"
        self.environ = {
            "PATH": "/usr/bin:/bin",
            "CXX": str(self.compiler),
            "TANDEM_CACHE_DIR": str(self.cache),
        }
        self.compiler_is(COMPILER)

    def compiler_is(self, script: str, seconds: float = 0.0, version: str = "1") -> None:
        text = script.replace("{log}", str(self.log)).replace("{seconds}", str(seconds))
        self.compiler.write_text(text.replace("$VERSION", version))
        self.compiler.chmod(0o755)

    def without_compiler(self) -> dict[str, str]:
        return {**self.environ, "CXX": "", "PATH": str(self.cache)}

    def num_built(self) -> int:
        """Return the number of libraries linked."""
        return self.log.read_text().count("-shared") if self.log.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class TestBuilding:
    def test_library_is_compiled_once(self, machine: Machine):
        """
        The first call says that it compiles, into the cache directory, and leaves nothing else there; the next finds the same file.
        """
        with structlog.testing.capture_logs() as logs:
            built = built_library(machine.environ)
            assert built == built_library(machine.environ)
        assert ["cpu_extension_building", "cpu_extension_built"] == [log["event"] for log in logs]
        assert 1 == machine.num_built()
        assert {".so", ".lock"} == {path.suffix for path in built.parent.iterdir()}
        assert machine.cache / "cpu_extension" == built.parent

    @pytest.mark.parametrize("what", ["compiler", "flags", "torch", "processor", "source"])
    def test_what_code_depends_on_is_part_of_the_name(
        self, machine: Machine, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        """
        Another compiler, set of flags, PyTorch, processor or source is another library.
        """
        first = built_library(machine.environ)
        if what == "compiler":
            machine.compiler_is(COMPILER, version="2")
        elif what == "flags":
            monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
        elif what == "torch":
            monkeypatch.setattr(torch, "__version__", "0.0")
        elif what == "processor":
            monkeypatch.setattr(build, "_cpu_features", lambda: b"flags: none")
        else:
            (tmp_path / "other.h").write_text("// more")
            monkeypatch.setattr(build, "_SOURCES", tmp_path)
        assert first != built_library(machine.environ)
        assert 2 == machine.num_built()

    def test_sources_of_one_name_in_two_folders_are_both_linked(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        """
        Each source has an object file of its own, whatever its folder.
        """
        sources = tmp_path / "sources"
        for folder in ("attention", "products"):
            (sources / folder).mkdir(parents=True)
            (sources / folder / "plan.cpp").write_text("// nothing")
        monkeypatch.setattr(build, "_SOURCES", sources)
        built_library(machine.environ)
        commands = [line.split() for line in machine.log.read_text().splitlines()]
        compiled = {words[-1] for words in commands if "-c" in words}
        (linked,) = (set(words) for words in commands if "-shared" in words)
        assert 2 == len(compiled & linked)

    def test_two_at_once_compile_once(self, machine: Machine):
        """
        A caller that comes while another compiles waits and takes the other's library.
        """
        machine.compiler_is(COMPILER, seconds=0.1)
        built: list[Path] = []
        threads = [
            threading.Thread(target=lambda: built.append(built_library(machine.environ)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 == len(set(built))
        assert (3, 1) == (len(built), machine.num_built())

    def test_lock_held_for_too_long_is_an_error(self, machine: Machine, monkeypatch):
        """
        Waiting for another process has an end, which names the lock.
        """
        monkeypatch.setattr(build, "_LOCK_TIMEOUT_S", 0.0)
        built = built_library(machine.environ)
        (lock,) = built.parent.glob("*.lock")
        built.unlink()
        with (
            build._locked(lock),
            pytest.raises(ExtensionUnavailable, match=f"another process has held {lock}"),
        ):
            built_library(machine.environ)
        assert 1 == machine.num_built()

    def test_library_of_an_absent_compiler_is_used(self, machine: Machine):
        """
        A library that was built earlier serves when there is no compiler any more.
        """
        built = built_library(machine.environ)
        assert built == built_library(machine.without_compiler())

    def test_damaged_library_is_built_again(self, machine: Machine):
        """
        A file with other bytes than its name tells is logged, passed over and replaced.
        """
        built = built_library(machine.environ)
        built.write_bytes(built.read_bytes()[:4])
        with structlog.testing.capture_logs() as logs:
            assert built == built_library(machine.environ)
        assert "compiled\n" == built.read_text()
        assert "cpu_extension_damaged" in [log["event"] for log in logs]

    def test_cache_that_cannot_be_written_serves_what_it_holds(self, machine: Machine, monkeypatch):
        """
        Finding a library writes nothing.
        """
        built = built_library(machine.environ)
        monkeypatch.setattr(Path, "mkdir", _refuse)
        monkeypatch.setattr(build, "_locked", _refuse)
        assert built == built_library(machine.environ)


def _refuse(*_args: object, **_kwargs: object) -> None:
    raise OSError("read-only file system")


class TestFailing:
    def test_no_compiler(self, machine: Machine):
        """
        Without compiler and library the reason names what was looked for.
        """
        with pytest.raises(ExtensionUnavailable, match=r"no C\+\+ compiler: neither \$CXX nor g"):
            built_library(machine.without_compiler())

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("#!/bin/sh\necho 'internal error' >&2; exit 4\n", "failed with 4: internal error"),
            ("#!/nowhere/sh\n", "compiler did not run: .*No such file"),
            (
                COMPILER.replace(
                    "echo", "[ -n '' ] || { echo 'No space left' >&2; exit 1; }; echo", 2
                ),
                "failed with 1: No space left",
            ),
        ],
        ids=["broken", "not-a-program", "full-disk"],
    )
    def test_compiler_that_fails(self, machine: Machine, script: str, reason: str):
        """
        The reason has the compiler's own words, and no file is left that looks like a library.
        """
        machine.compiler_is(script)
        with pytest.raises(ExtensionUnavailable, match=reason):
            built_library(machine.environ)
        assert [] == list(machine.cache.rglob("*.so"))

    def test_compiler_that_hangs(self, machine: Machine, monkeypatch: pytest.MonkeyPatch):
        """
        A compiler that does not end is stopped.
        """
        machine.compiler_is(COMPILER, seconds=30)
        monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.1)
        with pytest.raises(ExtensionUnavailable, match=r"did not run: .* timed out"):
            built_library(machine.environ)

    def test_cache_that_cannot_be_written(self, machine: Machine):
        """
        A cache directory that cannot be made is the reason.
        """
        machine.cache.write_text("a file")
        with pytest.raises(ExtensionUnavailable, match=r"cannot build into .*Not a directory"):
            built_library(machine.environ)

    def test_user_without_a_home(self, machine: Machine, monkeypatch: pytest.MonkeyPatch):
        """
        A user that the system does not know needs TANDEM_CACHE_DIR, and is told so.
        """

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", homeless)
        del machine.environ["TANDEM_CACHE_DIR"]
        with pytest.raises(ExtensionUnavailable, match="no TANDEM_CACHE_DIR is set"):
            built_library(machine.environ)

    def test_other_systems_are_told(self, machine: Machine, monkeypatch: pytest.MonkeyPatch):
        """
        Anything but Linux, and PyTorch on another OpenMP, is refused before anything is compiled.
        """
        maps = machine.cache.parent / "maps"
        maps.write_text("7f00-7f01 r-xp 00000000 08:01 1234 /usr/lib/libc.so.6\n")
        monkeypatch.setattr(build, "_MAPS", maps)
        with pytest.raises(ExtensionUnavailable, match="GNU OpenMP"):
            built_library(machine.environ)
        monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
        with pytest.raises(ExtensionUnavailable, match="written for Linux, this is Darwin"):
            built_library(machine.environ)
        assert 0 == machine.num_built()


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A process that has not loaded the library."""
    monkeypatch.setattr(library, "_loaded", [])
    yield
    use_cpu_extension("off")


class TestCommand:
    def test_path_or_reason_is_printed(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ):
        """
        The command prints the library's path and succeeds, or why there is none and fails.
        """
        monkeypatch.setattr(command, "built_library", lambda: built_library(machine.environ))
        assert 0 == command.main()
        assert f"{built_library(machine.environ)}\n" == capsys.readouterr().out
        machine.compiler_is("#!/bin/sh\necho 'out of order' >&2; exit 1\n")
        assert 1 == command.main()
        assert "out of order" in capsys.readouterr().err


class TestChoosing:
    @pytest.mark.compiler
    def test_extension_is_chosen_and_taken_back(self, unloaded):
        """
        "on" makes the CPU's plans C++, "off" PyTorch's; the log names what was chosen.
        """
        with structlog.testing.capture_logs() as logs:
            for wanted in ("on", "off", "auto"):
                use_cpu_extension(wanted)
                _operation.on(CPU)
        chosen = [log["implementation"] for log in logs if log["event"] == "kernel_chosen"]
        assert ["cpu-extension", "cpu", "cpu-extension"] == chosen

    def test_missing_library_is_a_warning_or_an_error(
        self, unloaded, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ):
        """
        A missing library makes "auto" warn once and compute with PyTorch, and makes "on" fail.
        """
        monkeypatch.setattr(
            library, "built_library", lambda: built_library(machine.without_compiler())
        )
        with structlog.testing.capture_logs() as logs:
            use_cpu_extension("auto")
            _operation.on(CPU)
        told = [(log["event"], log["log_level"]) for log in logs]
        assert [("cpu_extension_unavailable", "warning"), ("kernel_chosen", "info")] == told
        assert "no C++ compiler" in logs[0]["reason"]
        assert "cpu" == logs[1]["implementation"]
        with pytest.raises(ExtensionUnavailable):
            use_cpu_extension("on")

    @pytest.mark.compiler
    def test_library_that_cannot_be_loaded_is_missing(
        self, unloaded, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ):
        """
        A file that the system refuses to load is the reason, and the next call tries again.
        """
        with monkeypatch.context() as patched:
            patched.setattr(library, "built_library", lambda: built_library(machine.environ))
            with pytest.raises(ExtensionUnavailable, match=r"cannot be loaded: .*file too short"):
                use_cpu_extension("on")
        use_cpu_extension("on")
