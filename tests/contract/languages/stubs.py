"""
Generates the stubs of a language with protos/buf.gen.yaml, and compiles them in a temporary folder
with the program beside this file that uses them as a client does.

What is generated is counted by the names that the contract declares, so that a generator that
leaves a message out is noticed. Compilers and libraries are those of deploy/local/toolchains.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROTOS = ROOT / "protos"
PROGRAMS = Path(__file__).resolve().parent
TOOLCHAINS = ROOT / "deploy/local/toolchains"
BUF = ROOT / "deploy/local/buf"


class StubsError(Exception):
    """A command that failed, with what it printed."""


class ToolMissing(StubsError):
    """A tool is not there and could not be installed."""


EXIT_NOT_INSTALLED = 75
"""Exit code of deploy/local/buf without buf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """
    How the stubs of one language look, and how they are compiled.

    Attributes:
        suffix: Names of generated files end with it.
        message: Pattern of a generated message; its group is the message's name.
        service: Pattern of a generated client of a service, likewise; None where none is generated.
        compile: Compiles the folder of stubs, or None where no compiler is tried. It gets the
            folder and that of the language's plugins and libraries.
    """

    suffix: str
    message: str
    service: str | None
    compile: Callable[[Path, Path], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stubs:
    """
    Stubs of a language as they were generated and compiled.

    Attributes:
        messages: How often each message of the contract was generated, by name.
        services: The same of services.
        is_compiled: True if a compiler took all of it; False where none is tried.
        seconds: Time for all of it.
    """

    messages: Counter[str]
    services: Counter[str]
    is_compiled: bool
    seconds: float


def declared(kind: str) -> Counter[str]:
    """Return how often the contract declares each name of a kind: `message` or `service`."""
    files = PROTOS.glob("tandem/**/*.proto")
    pattern = re.compile(rf"^{kind} (\w+)", re.MULTILINE)
    return Counter(name for file in files for name in pattern.findall(file.read_text()))


def missing(language: str) -> str:
    """Return what generating and compiling a language's stubs lacks here; "" if nothing."""
    command = [str(TOOLCHAINS), "--check", language]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()


def make_stubs(language: str, folder: Path) -> Stubs:
    """
    Generate and compile the stubs of a language.

    Args:
        language: One of LANGUAGES.
        folder: An empty folder to do it in.

    Raises:
        ToolMissing: A tool could not be installed here.
        StubsError: A generator or a compiler failed.
    """
    start_s = time.monotonic()
    known = LANGUAGES[language]
    installed = Path(_run([str(TOOLCHAINS), "--folder", language], ROOT).strip())
    stubs = folder / language
    stubs.mkdir()
    template = folder / "buf.gen.yaml"
    template.write_text(_template(language))
    plugins = {"PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = ["generate", str(PROTOS), "--template", str(template), "--output", str(folder)]
    _run([str(BUF), *command], ROOT, plugins)
    texts = [path.read_text() for path in sorted(stubs.rglob(f"*{known.suffix}"))]
    if known.compile is not None:
        if (PROGRAMS / language).is_dir():
            shutil.copytree(PROGRAMS / language, stubs, dirs_exist_ok=True)
        known.compile(stubs, installed)
    return Stubs(
        messages=_generated(known.message, "message", texts),
        services=_generated(known.service, "service", texts) if known.service else Counter(),
        is_compiled=known.compile is not None,
        seconds=time.monotonic() - start_s,
    )


def _template(language: str) -> str:
    """Return protos/buf.gen.yaml with the plugins of one language only."""
    head, *plugins = re.split(r"(?m)^(?=  - )", (PROTOS / "buf.gen.yaml").read_text())
    chosen = [plugin for plugin in plugins if f"    out: {language}\n" in plugin]
    assert chosen, f"protos/buf.gen.yaml has no plugin for {language}"
    return head + "".join(chosen)


def _generated(pattern: str, kind: str, texts: Sequence[str]) -> Counter[str]:
    """Return how often each declared name of a kind was generated."""
    names = declared(kind)
    found = (name for text in texts for name in re.findall(pattern, text, re.MULTILINE))
    return Counter(name for name in found if name in names)


def _run(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a command in a folder and return what it printed to its standard output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == EXIT_NOT_INSTALLED:
        raise ToolMissing(done.stderr.strip())
    if done.returncode != 0:
        raise StubsError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _compile_go(stubs: Path, installed: Path) -> None:
    """Compile all packages; go.mod and go.sum are those with which the libraries were fetched."""
    for name in ("go.mod", "go.sum"):
        shutil.copy(installed / name, stubs)
    _run(["go", "build", "-o", os.devnull, "./..."], stubs, {"GOFLAGS": "-mod=mod"})


def _compile_java(stubs: Path, installed: Path) -> None:
    """Compile all classes with the jars of grpc-java and protobuf-java."""
    sources = [str(path) for path in stubs.rglob("*.java")]
    options = ["-nowarn", "-proc:none", "-d", str(stubs / "classes")]
    _run(["javac", *options, "-cp", str(installed / "lib" / "*"), *sources], stubs)


def _compile_typescript(stubs: Path, installed: Path) -> None:
    """Check types, strictly, and write JavaScript."""
    (stubs / "node_modules").symlink_to(installed / "node_modules")
    _run([str(installed / "bin/tsc"), "--project", str(stubs)], stubs)


def _compile_cpp(stubs: Path, _installed: Path) -> None:
    """Compile each file by itself and link the program with all of them."""
    sources = [path for path in stubs.rglob("*.cc") if _has_code(path)]
    packages = ["protobuf", "grpc++"]
    flags = _run(["pkg-config", "--cflags", *packages], stubs).split()
    libraries = _run(["pkg-config", "--libs", *packages], stubs).split()

    def compile_one(source: Path) -> str:
        target = f"{source}.o"
        options = ["-std=c++17", "-O0", *flags, f"-I{stubs}", "-c", str(source), "-o", target]
        _run(["g++", *options], stubs)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    _run(["g++", *objects, *libraries, "-o", str(stubs / "program")], stubs)


def _has_code(source: Path) -> bool:
    """Return False for the file that gRPC's plugin writes for a proto without a service."""
    is_service = source.name.endswith(".grpc.pb.cc")
    return not is_service or "Service::NewStub" in source.read_text()


def _compile_rust(stubs: Path, installed: Path) -> None:
    """Check the crate; libraries are compiled already, and Cargo.lock is theirs."""
    for name in ("Cargo.toml", "Cargo.lock"):
        shutil.copy(installed / name, stubs)
    target = {"CARGO_TARGET_DIR": str(installed / "target")}
    _run(["cargo", "check", "--quiet", "--offline", "--locked"], stubs, target)


LANGUAGES = {
    "go": Language(
        suffix=".pb.go",
        message=r"^type (\w+) struct \{$",
        service=r"^type (\w+)Client interface \{$",
        compile=_compile_go,
    ),
    "java": Language(
        suffix=".java",
        message=r"^public final class (\w+) extends$",
        service=r"^public final class (\w+)Grpc \{$",
        compile=_compile_java,
    ),
    "typescript": Language(
        suffix="_pb.ts",
        message=r"^export type (\w+) = Message<",
        service=r"^export const (\w+): GenService<",
        compile=_compile_typescript,
    ),
    "cpp": Language(
        suffix=".pb.h",
        message=r"^class (\w+) final :$",
        service=r"^class (\w+) final \{$",
        compile=_compile_cpp,
    ),
    "rust": Language(
        suffix=".rs",
        message=r"^pub struct (\w+) \{",
        service=r"^    pub struct (\w+)Client<T> \{$",
        compile=_compile_rust,
    ),
    "csharp": Language(
        suffix=".cs",
        message=r"^  public sealed partial class (\w+) : pb::IMessage<",
        service=None,
        compile=None,
    ),
}
