"""
Builds the images, runs them as containers and writes what was seen: `python -m
tests.deploy.images.run`. It takes minutes, 30 GB of disk while it builds, and a user that may run
containers.

Each container has a read-only root, no capability and the image's own user. A client on this
machine streams a completion of the bundled model from the scheduler's container, which reaches the
executor's by name. What was seen goes into results.json and results.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deploy.images.build import IMAGES, version
from deploy.images.health import fault, options
from tandem_client import Client
from tests.deploy.images import base
from tests.deploy.images.page import page
from tests.deploy.images.podman import Podman, missing_programs
from tests.deploy.installs.run import machine
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
MODEL = ROOT / "deploy/models/tandem-py"
PROMPT = "def read_json(path: str) -> dict:"
USER = 65532
TOKEN = "/etc/tandem/link-token"
PACKAGES_LIMIT_MB = 250
"""Most that the scheduler's Python packages may take."""
PROBE = """
import json, pathlib, sys
status = dict(line.split(":", 1) for line in open("/proc/1/status") if ":" in line)
written = {}
for place in sys.argv[1:]:
    try:
        pathlib.Path(place, "probe").write_text("")
        written[place] = True
    except OSError:
        written[place] = False
print(json.dumps({
    "user": int(status["Uid"].split()[0]),
    "capabilities": int(status["CapEff"], 16),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "written": written,
}))
"""
SIZES = """
import collections, importlib.util, json, pathlib, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
sizes = collections.Counter()
for path in site.rglob("*"):
    if path.is_file() and not path.is_symlink():
        sizes[path.relative_to(site).parts[0]] += path.stat().st_size
print(json.dumps({
    "all": sum(sizes.values()),
    "largest": sizes.most_common(6),
    "has_torch": importlib.util.find_spec("torch") is not None,
}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, run, write the page; gives 1 if a container was not as it must be."""
    parser = argparse.ArgumentParser(prog="tests.deploy.images.run", description=__doc__)
    parser.add_argument("--base", help="base image; default: one made by tests.deploy.images.base")
    parser.add_argument("--built", action="store_true", help="take images that are there")
    chosen = parser.parse_args(arguments)
    if missing := missing_programs("podman", *([] if chosen.built else ["buildah"])):
        print(f"run: NOTHING WAS RUN: missing: {' '.join(missing)}", file=sys.stderr)
        return base.EXIT_UNAVAILABLE
    seen: dict[str, Any] = {"date": dt.datetime.now(tz=dt.UTC).date().isoformat()}
    seen["machine"] = machine()
    if not chosen.built:
        seen["build_s"] = build(chosen.base or base.make())
    with tempfile.TemporaryDirectory(prefix="tandem-run-") as folder:
        podman = Podman(Path(folder), f"tandem-{os.getpid()}")
        try:
            measure(podman, Path(folder), seen)
        finally:
            podman.clean()
    old = HERE / "results.json"
    if chosen.built and old.exists():
        seen["build_s"] = json.loads(old.read_text())["build_s"]
    old.write_text(json.dumps(seen, indent=2, sort_keys=True) + "\n")
    (HERE / "results.md").write_text(page(seen))
    wrong = faults(seen)
    print((HERE / "results.md").read_text(), *(f"WRONG: {one}" for one in wrong), sep="\n")
    return int(bool(wrong))


def image(name: str) -> str:
    """Return the full name of an image."""
    return f"localhost/tandem-{name}:{version()}"


def build(base_image: str) -> dict[str, float]:
    """Build all images on a base, and return the seconds of each."""
    seconds = {}
    # Without root in a namespace of its own, RUN needs chroot.
    environment = {"BUILDAH_ISOLATION": "chroot"} | os.environ
    for name in IMAGES:
        begin_s = time.monotonic()
        command = [sys.executable, "deploy/images/build.py", name, f"--base={base_image}"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        seconds[name] = round(time.monotonic() - begin_s, 1)
    return seconds


def measure(podman: Podman, folder: Path, seen: dict[str, Any]) -> None:
    """Run the images together, and put what is seen into `seen`."""
    seen["images"] = {name: sizes(podman, image(name)) for name in IMAGES}
    token = folder / "link-token"
    token.write_text(os.urandom(32).hex() + "\n")
    network = podman.make("network", "net")
    volume = podman.make("volume", "kernels")
    secret = podman.make("secret", "link-token", str(token))
    # Podman 4.3 cannot mount into /run/secrets below a read-only root.
    shared = [f"--secret={secret},target={TOKEN},uid={USER},mode=0400"]
    executor = [
        *(*shared, f"--network={network}:alias=executor", f"--volume={MODEL}:/models/tandem-py:ro"),
        f"--volume={volume}:/var/cache/tandem",
    ]
    with_token = f"--link-token-file={TOKEN}"

    def start_executor() -> float:
        command = ["--model=/models/tandem-py", with_token]
        begin_s = time.monotonic()
        podman.start("executor", image("executor"), executor, command)
        return seconds_to_ready(podman, "executor", network, 50061, begin_s)

    seen["executor_first_start_s"] = start_executor()
    podman("stop", "--time=30", podman.name("executor"))
    seen["executor_exit"] = podman.inspect("executor")["State"]["ExitCode"]
    podman.remove("executor")
    seen["executor_next_start_s"] = start_executor()
    scheduler = [*shared, f"--network={network}:alias=scheduler"]
    begin_s = time.monotonic()
    command = ["--executor=executor:50061", with_token]
    podman.start("scheduler", image("scheduler"), scheduler, command)
    seen["scheduler_start_s"] = seconds_to_ready(podman, "scheduler", network, 50051, begin_s)
    seen["scheduler_idle"] = memory(podman, "scheduler")
    podman.start(
        "gateway",
        image("gateway"),
        [f"--network={network}"],
        ["--scheduler=scheduler:50051", "--listen=0.0.0.0:8000"],
    )
    seen["inside"] = {
        name: inside(podman, name, ["/", "/opt/tandem", "/tmp", "/var/cache/tandem"])
        for name in IMAGES
    }
    seen["stream"] = streamed(podman, network)
    seen["http"] = streamed_over_http(podman.address("gateway", network))
    seen["drain"] = drained(podman, network)
    seen["executor_idle"] = memory(podman, "executor")


def sizes(podman: Podman, name: str) -> dict[str, Any]:
    """Return the size of an image and of its Python packages, in bytes."""
    packages = json.loads(podman.once(name, "-c", SIZES, entrypoint="/opt/tandem/bin/python"))
    told = json.loads(podman("image", "inspect", name))[0]
    return {"bytes": told["Size"], "user": told["Config"]["User"], "packages": packages}


def seconds_to_ready(podman: Podman, short: str, network: str, port: int, begin_s: float) -> float:
    """Wait until a container's service is ready, and return the seconds since `begin_s`."""
    asked = options([f"{podman.address(short, network)}:{port}", "--timeout-s=1"])

    def is_ready() -> bool:
        assert podman.inspect(short)["State"]["Running"], f"{short} ended: {podman.logs(short)}"
        return fault(asked) is None

    wait_until(is_ready, f"{short} to be ready", limit_s=600)
    return round(time.monotonic() - begin_s, 1)


def memory(podman: Podman, short: str) -> dict[str, Any]:
    """Return the memory of a container's processes in bytes, shared pages counted once."""
    processes = podman.processes(short)
    return {
        "processes": len(processes),
        "pss": sum(process.memory_full_info().pss for process in processes),
    }


def inside(podman: Podman, short: str, places: Sequence[str]) -> dict[str, Any]:
    """Return a container's user and rights, and which places it can write to."""
    return json.loads(podman.inside(short, "python", "-c", PROBE, *places))


def streamed(podman: Podman, network: str) -> dict[str, Any]:
    """Stream a completion from the scheduler's container, and return what came."""
    with Client(f"{podman.address('scheduler', network)}:50051") as client:
        stream = client.generate(PROMPT, max_tokens=64, temperature=0)
        pieces = list(stream.text)
        whole = client.complete(PROMPT, max_tokens=64, temperature=0)
    return {
        "pieces": len(pieces),
        "text": "".join(pieces),
        "is_whole": whole.text == "".join(pieces),
    }


def streamed_over_http(address: str) -> int:
    """Stream a completion from the gateway's container, and return the number of chunks."""
    wanted = {"model": "tandem-py", "prompt": PROMPT, "max_tokens": 16, "stream": True}
    request = urllib.request.Request(
        f"http://{address}:8000/v1/completions",
        json.dumps(wanted).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers() -> bool:
        try:
            return opener.open(f"http://{address}:8000/health", timeout=5).status == 200
        except OSError:
            return False

    wait_until(answers, "the gateway to be ready")
    with opener.open(request, timeout=60) as answer:
        lines = [line for line in answer if line.startswith(b"data: {")]
    return len(lines)


def drained(podman: Podman, network: str) -> dict[str, Any]:
    """Stop the scheduler while it streams, and return how stream and container ended."""
    with Client(f"{podman.address('scheduler', network)}:50051") as client:
        stream = client.generate(PROMPT, max_tokens=900, ignore_eos=True)
        pieces = iter(stream.text)
        next(pieces)
        stop = ["podman", "stop", "--time=45", podman.name("scheduler")]
        stopping = subprocess.Popen(stop, env=podman.environment, stdout=subprocess.DEVNULL)
        count = 1 + sum(1 for _ in pieces)
        stopping.wait()
    return {"pieces": count, "exit": podman.inspect("scheduler")["State"]["ExitCode"]}


def faults(seen: dict[str, Any]) -> list[str]:
    """Return what is not as it must be."""
    scheduler = seen["images"]["scheduler"]["packages"]
    checks: list[tuple[str, Callable[[], bool]]] = [
        ("the scheduler's image has torch", lambda: not scheduler["has_torch"]),
        (
            f"the scheduler's packages take over {PACKAGES_LIMIT_MB} MB",
            lambda: scheduler["all"] < PACKAGES_LIMIT_MB * 10**6,
        ),
        ("no stream of several pieces came", lambda: seen["stream"]["pieces"] > 1),
        ("stream and whole answer differ", lambda: seen["stream"]["is_whole"]),
        ("no stream of several chunks came over HTTP", lambda: seen["http"] > 1),
        ("a drained scheduler did not end with 0", lambda: seen["drain"]["exit"] == 0),
        ("a drained stream was cut", lambda: seen["drain"]["pieces"] > 1),
        ("a stopped executor did not end with 0", lambda: seen["executor_exit"] == 0),
    ]
    for name, found in seen["inside"].items():
        rights = (found["user"], found["capabilities"], found["no_new_privileges"])
        checks += [
            (f"{name} has rights: {rights}", lambda rights=rights: rights == (USER, 0, 1)),
            (
                f"{name} can write to its root",
                lambda found=found: not (found["written"]["/"] or found["written"]["/opt/tandem"]),
            ),
        ]
    return [sentence for sentence, holds in checks if not holds()]


if __name__ == "__main__":
    sys.exit(main())
