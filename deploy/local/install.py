"""
Install the project into the environment that runs this, once: `install.py EXTRAS COMMAND`.

`setup` calls it; COMMAND is the command of the user, and its name begins each line. The program
first prints the size of the download, then each package as it is downloaded; a terminal shows this
as one changing line. Files `.tandem-*` in the environment record what was installed, from which
index, and if an installation is unfinished.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import select
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "deploy/local/constraints.txt"
VENV = Path(sys.prefix)
UNFINISHED = VENV / ".tandem-unfinished"
INDEX_RECORD = VENV / ".tandem-torch-index"
AUTHORITIES_RECORD = VENV / ".tandem-authorities"
"""Names the file of authorities that pip needs here, for what else the caller has pip install."""
LOG = VENV / ".tandem-install.log"
ALL_EXTRAS = "dev"
"""Name of the extra with all packages that `demo` and `test` need."""

INSTALLING = "Installing collected packages"
DOWNLOAD = re.compile(r"(?:Downloading|Using cached) (\S+?)-\d\S* \((\d+(?:\.\d+)?) (MB|GB)\)")
FOR_CUDA = re.compile(r"\s*(Collecting nvidia|Processing \S*/nvidia)")
CHATTER = re.compile(
    r"\s*(Collecting|Downloading|Using cached|Requirement already|Obtaining|Looking in)"
)
BIG_MB = 50
"""Size in MB from which a package gets a line of its own if there is no terminal."""
STILL_S = 30
NO_NETWORK = re.compile(
    r"NewConnectionError|Failed to establish|NameResolutionError|Network is unreachable"
    r"|ConnectTimeout|ReadTimeout|Read timed out|Connection (?:refused|reset|aborted)"
    r"|RemoteDisconnected|ProtocolError|IncompleteRead|ProxyError|SSLError",
)
UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED")
NO_SPACE = re.compile(r"No space left on device|Errno 28|Disk quota exceeded")
EXIT_STOPPED = 130

CUDA_GB, CPU_GB, MACOS_GB = (2.9, 5.0), (0.3, 1.0), (0.2, 0.8)
"""GB to download and GB on the disk after that, by build of PyTorch."""
CHECKS_GB = (0.1, 0.4)
"""GB that the extra with the checks adds to both."""


class InstallationError(Exception):
    """Error of a failed installation; the text is a sentence that says why."""


class UntrustedCertificate(InstallationError):
    """Error of an installation whose package index has a certificate that pip does not trust."""


class Terminal:
    """Output for the user; on a terminal the last line shows the present activity."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._live = sys.stderr.isatty()
        self._shown = time.monotonic()

    def say(self, sentence: str) -> None:
        """Write a line that stays."""
        clear = "\r\033[K" if self._live else ""
        print(f"{clear}{self._name}: {sentence}", file=sys.stderr, flush=True)
        self._shown = time.monotonic()

    def show(self, sentence: str) -> None:
        """Replace the changing line; without a terminal print a line after a long silence."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(
                f"\r\033[K{f'{self._name}: {sentence}'[:width]}",
                end="",
                file=sys.stderr,
                flush=True,
            )
        elif time.monotonic() - self._shown >= STILL_S:
            self.say(sentence)

    def begin(self, sentence: str, *, matters: bool) -> None:
        """Announce the next activity; without a terminal at once only if it matters."""
        if self._live or not matters:
            self.show(sentence)
        else:
            self.say(sentence)

    def clear(self) -> None:
        """Remove the changing line."""
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def stamp(extras: str) -> Path:
    """Return the file that records the state for which these extras were installed."""
    return VENV / f".tandem-{extras}"


def wanted(extras: str) -> str:
    """Return a hash of everything that decides which packages are installed."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(part.read_bytes())
    digest.update(f"{ROOT} {extras} {sys.version}".encode())
    return digest.hexdigest()


def is_installed(extras: str) -> bool:
    """Return True if these extras, or all, are installed in the state wanted now."""
    return any(
        stamp(one).is_file() and stamp(one).read_text().strip() == wanted(one)
        for one in (extras, ALL_EXTRAS)
    )


def has_nvidia_device() -> bool:
    """Return True if there is an NVIDIA driver (or, in WSL, that of Windows)."""
    return any(Path(one).exists() for one in ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg"))


def pip(arguments: Sequence[str]) -> list[str]:
    """Return the pip command that installs the versions of constraints.txt."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    return [*command, f"--constraint={CONSTRAINTS}", *arguments]


def has_torch() -> bool:
    """Return True if the environment has the PyTorch version of constraints.txt, in any build."""
    try:
        version = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return False
    return f"torch=={version}" in CONSTRAINTS.read_text().splitlines()


def estimate(extras: str, index: str) -> str:
    """Return a text on the size of the download."""
    if has_torch():
        return "PyTorch is there already: at most 0.3 GB to download"
    if platform.system() == "Darwin":
        return sizes(extras, MACOS_GB)
    if index:
        return sizes(extras, CPU_GB)
    return f"{sizes(extras, CUDA_GB)}; a tenth where pip finds a build of PyTorch for CPUs"


def sizes(extras: str, kind: tuple[float, float]) -> str:
    """Return a text on the sizes with a build of PyTorch."""
    added = CHECKS_GB if extras == ALL_EXTRAS else (0.0, 0.0)
    download, disk = (one + more for one, more in zip(kind, added, strict=True))
    return f"about {download:.1f} GB to download, {disk:.1f} GB on the disk: a minute or more"


def advice(command: str) -> str:
    """Return a text on how a machine without an NVIDIA device can save space."""
    return (
        f"this PyTorch is for CUDA, and there is no NVIDIA device here. To save "
        f"{CUDA_GB[0] - CPU_GB[0]:.1f} GB, stop this and run TANDEM_TORCH_INDEX=URL {command} with "
        "the address of a package index of CPU builds (PyTorch's installation page names one)"
    )


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """Yield each line that the process writes, and None after each second without one."""
    assert process.stdout is not None
    source, rest = process.stdout.fileno(), b""
    while True:
        if not select.select([source], [], [], 1.0)[0]:
            yield None
            continue
        read = os.read(source, 1 << 16)
        if not read:
            break
        *lines, rest = (rest + read).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def run_pip(terminal: Terminal, arguments: Sequence[str], user_command: str) -> None:
    """
    Run pip; once more with the system's authorities if pip's own list lacks the index's.

    Before version 24.2 pip knows no authority that was added to the system, such as that of a
    company's proxy.

    Raises:
        InstallationError: pip failed.
    """
    try:
        run_pip_once(terminal, arguments, user_command)
    except UntrustedCertificate:
        authorities = ssl.get_default_verify_paths().cafile
        if authorities is None or os.environ.get("PIP_CERT"):
            raise
        terminal.say(
            f"pip does not trust the package index; trying {authorities}, which this system trusts"
        )
        os.environ["PIP_CERT"] = authorities
        run_pip_once(terminal, arguments, user_command)
        AUTHORITIES_RECORD.write_text(authorities)


def run_pip_once(terminal: Terminal, arguments: Sequence[str], user_command: str) -> None:
    """
    Run pip, show its activity and write its output to the log.

    The environment counts as unfinished from pip's first change of it to pip's success.

    Raises:
        UntrustedCertificate: pip does not trust the index.
        InstallationError: pip failed for another reason.
    """
    UNFINISHED.touch()
    command = pip(["--progress-bar=off", *arguments])
    environment = os.environ | {"PIP_QUIET": "0", "PIP_VERBOSE": "0", "PYTHONUNBUFFERED": "1"}
    with LOG.open("a+") as log:
        begin = log.tell()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            follow(terminal, lines_of(process), log, user_command)
            process.wait()
        except KeyboardInterrupt:
            # pip was interrupted as well, and cleans up.
            process.wait(timeout=10)
            raise
        finally:
            process.kill()
            log.seek(begin)
            words = log.read()
            if process.wait() == 0 or INSTALLING not in words:
                UNFINISHED.unlink()
    if process.returncode:
        is_untrusted = UNTRUSTED.search(words) and not NO_SPACE.search(words)
        raise (UntrustedCertificate if is_untrusted else InstallationError)(failure(words))


def follow(terminal: Terminal, lines: Iterator[str | None], log: TextIO, user_command: str) -> None:
    """Show pip's activity, read from its lines, until it ends."""
    doing, since = "asking which packages are needed", time.monotonic()
    loaded_mb = size_mb = 0.0
    advised = has_nvidia_device()
    terminal.begin(doing, matters=False)
    for line in lines:
        if line is None:
            terminal.show(f"{doing}, {time.monotonic() - since:.0f} s")
            continue
        log.write(f"{line}\n")
        if not advised and FOR_CUDA.match(line):
            advised = True
            terminal.say(advice(user_command))
        if match := DOWNLOAD.search(line):
            loaded_mb += size_mb
            size_mb = float(match[2]) * (1000 if match[3] == "GB" else 1)
            doing = f"getting {match[1]} ({size_mb:.0f} MB), {loaded_mb:.0f} MB before it"
            matters = size_mb >= BIG_MB
        elif line.startswith(INSTALLING):
            doing, matters = f"unpacking {line.count(',') + 1} packages", True
        else:
            continue
        since = time.monotonic()
        terminal.begin(doing, matters=matters)
    terminal.clear()


def failure(words: str) -> str:
    """Return the reason why pip failed; for an uncommon one print pip's own lines."""
    if NO_SPACE.search(words):
        free = " and ".join(
            f"{shutil.disk_usage(folder).free / 1e9:.1f} GB in {folder}"
            for folder in (VENV, Path(tempfile.gettempdir()))
        )
        return (
            f"a disk is full ({free} are free), and pip needs room in both, in the second for a "
            "while; make room, or set TMPDIR to a larger disk, and run this again"
        )
    if UNTRUSTED.search(words):
        return (
            "the package index shows a certificate that is not trusted here; where a proxy signs "
            "with a certificate of its own, name it (PIP_CERT=/path/to/ca.pem) and run this again "
            f"(pip's words are in {LOG})"
        )
    if NO_NETWORK.search(words):
        return (
            "no package index could be reached, or the connection broke off; look at the network, "
            f"proxies and pip's configuration, and run this again (pip's words are in {LOG})"
        )
    told = [line for line in words.splitlines() if line.strip() and not CHATTER.match(line)]
    print("\n".join(told[-30:]), file=sys.stderr)
    return "pip could not install the project; its lines above say why. Run this again to retry"


def install(terminal: Terminal, extras: str, index: str, command: str) -> None:
    """
    Install the project with these extras, and PyTorch from `index` if that is not empty.

    Raises:
        InstallationError: pip failed.
    """
    for old in VENV.glob(".tandem-*"):
        if old != INDEX_RECORD:
            old.unlink()
    terminal.say("installing (once; later runs skip this)")
    terminal.say(estimate(extras, index))
    if index:
        try:
            run_pip(terminal, ["--no-deps", f"--index-url={index}", "torch"], command)
        except InstallationError as error:
            raise InstallationError(
                f"no PyTorch from TANDEM_TORCH_INDEX={index}: {error}"
            ) from None
        INDEX_RECORD.touch(mode=0o600)  # an address can have a password in it
        INDEX_RECORD.write_text(index)
    run_pip(terminal, [f"--editable={ROOT}[{extras}]"], command)
    build_kernels(terminal)
    stamp(extras).write_text(wanted(extras))


def build_kernels(terminal: Terminal) -> None:
    """Compile the C++ kernels; if that fails, the executor reports it and uses PyTorch."""
    terminal.begin(
        "compiling the C++ kernels for this processor: up to a minute, once", matters=True
    )
    subprocess.run(
        [sys.executable, "-m", "kernels.cpu_extension"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    terminal.clear()


def main() -> int:
    """Install if that is needed, and return the exit status."""
    extras, command = sys.argv[1:]
    terminal = Terminal(Path(command).name)
    try:
        if not is_installed(extras):
            install(terminal, extras, os.environ.get("TANDEM_TORCH_INDEX", ""), command)
    except InstallationError as error:
        terminal.say(str(error))
        return 1
    except OSError as error:
        terminal.say(f"could not write to {VENV}: {error}")
        return 1
    except KeyboardInterrupt:
        terminal.say("stopped; run it again to go on")
        return EXIT_STOPPED
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
