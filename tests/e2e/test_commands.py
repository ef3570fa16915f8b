"""`tandem up`, one-command servers and the demo: they serve, and leave no process running."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from tandem_client import NO_RETRY, AdminClient, Client, Delta, Scheduled
from tests.e2e.cluster import ROOT, environment, paused
from tests.waiting import LIMIT_S, wait_until

ANY_PORTS = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "metrics-listen")]
PROMPT = "def fibonacci(n):"
ENDLESS = 100_000
"""
Number of tokens that take minutes even at a millisecond each, since each attends to all before it.
"""


@contextlib.contextmanager
def command(*arguments, program=(sys.executable, "-m", "tandem_client"), env=None):
    """Start a command in a process of its own; kill whatever is left of it at the end."""
    process = subprocess.Popen(
        [*program, *map(str, arguments)],
        cwd=ROOT,
        env=environment() | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for member in family(process):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.communicate()


def family(process):
    """Return the process and all that it started and that still run."""
    try:
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def all_gone(members):
    """Wait until none of these processes runs any more."""
    wait_until(
        lambda: all(not m.is_running() or m.status() == psutil.STATUS_ZOMBIE for m in members),
        f"end of {members}",
    )


def serving(process):
    """Wait until `tandem up` announces its address, and return it."""
    for line in process.stdout:
        if line.startswith("serving at "):
            return line.split()[2]
    raise AssertionError(process.stderr.read())


def announced(process):
    """
    Return what `tandem up` prints after the address of a server, by the word that a line begins
    with; the texts of lines with the same word follow one another.
    """
    said: dict[str, str] = {}
    for line in iter(process.stdout.readline, "Ctrl-C stops it\n"):
        word, _, rest = line.strip().partition(" ")
        said[word] = f"{said[word]}\n{rest}" if word in said else rest
    return said


def operators_at(process):
    """Return the operators' address from the rest of the announcement."""
    return announced(process)["operators"].strip()


@pytest.mark.slow
class TestUp:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
    def test_one_signal_ends_everything(self, tiny_model, number):
        """
        `tandem up` serves; one Ctrl-C or SIGTERM ends it with 0 and no process is left.
        """
        with command("up", tiny_model, *ANY_PORTS) as process:
            with Client(serving(process), retry=NO_RETRY) as client:
                assert "tiny-llama" == client.get_model().name
                assert 3 == len(client.complete("x", max_tokens=3, ignore_eos=True).token_ids)
            members = family(process)
            assert len(members) >= 4
            process.send_signal(number)
            _, errors = process.communicate(timeout=LIMIT_S)

            assert 0 == process.returncode
            assert "Traceback" not in errors
            all_gone(members)

    def test_nothing_outlives_kill_9(self, tiny_model):
        """
        Kill -9 of `tandem up` ends its services too.
        """
        with command("up", tiny_model, *ANY_PORTS) as process:
            serving(process)
            members = family(process)
            process.kill()

            all_gone(members)

    def test_file_and_flags_reach_both_services(self, tiny_model, tmp_path):
        """
        Limits and scheduling options of the file and of flags are in force, the running server says
        where each came from, and the announcement has a line for each warning of the scheduler or
        the executor.
        """
        file = tmp_path / "limits.json"
        file.write_text('{"max_num_seqs": 7, "max_num_blocks": 20, "schedule_policy": "lof"}')
        limits = [f"--config={file}", "--max-batch-size=8", "--no-enable-prefix-caching"]
        with command("up", tiny_model, *ANY_PORTS, *limits) as process:
            serving(process)
            said = announced(process)
            with AdminClient(said["operators"].strip(), retry=NO_RETRY) as admin:
                shown = {one.name: (one.value, one.source) for one in admin.config()}
                blocks = admin.stats().total_blocks

        assert (7, "file") == shown["max_num_seqs"]
        assert (8, "flag") == shown["max_batch_size"]
        first, second = said["warning"].splitlines()
        assert "max_batch_size 8 can never be reached: max_num_seqs is 7" in first
        assert "max_model_len is 320, the tokens that the KV memory holds, instead of 512" in second
        assert ("lof", "file") == shown["schedule_policy"]
        assert (False, "flag") == shown["enable_prefix_caching"]
        assert 20 == blocks

    def test_what_it_suggests_works_without_a_tokenizer(self, tiny_model, tmp_path):
        """
        A model without a tokenizer makes the announcement suggest token ids, in a form that works.
        """
        folder = shutil.copytree(tiny_model, tmp_path / "model")
        (folder / "tokenizer.json").unlink()
        with command("up", folder, *ANY_PORTS) as process:
            serving(process)
            said = announced(process)
            suggestion = shlex.split(said["tandem"])
            with command(*suggestion, "--ignore-eos", "--max-tokens", "4") as generate:
                output, errors = generate.communicate(timeout=LIMIT_S)

        assert ["generate", "--token-ids"] == suggestion[:2]
        assert (0, 4) == (generate.returncode, len([int(one) for one in output.split()])), errors
        assert "the model has no tokenizer.json" in said["warning"]

    def test_drain_ends_the_command(self, tiny_model):
        """
        A drain ends the command, which says so, stops everything and exits with 0.
        """
        with command("up", tiny_model, *ANY_PORTS) as process:
            serving(process)
            members = family(process)
            with command("drain", "--admin-address", operators_at(process)) as drain:
                assert 0 == drain.wait(LIMIT_S)
            _, errors = process.communicate(timeout=LIMIT_S)

            assert 0 == process.returncode
            assert "drained: no request is left and none is taken" in errors
            all_gone(members)

    def test_scheduler_that_dies_ends_the_command(self, tiny_model):
        """
        A scheduler that dies ends the command, which says how, ends the executor and exits with 1.
        """
        with command("up", tiny_model, *ANY_PORTS) as process:
            serving(process)
            members = family(process)
            (scheduler,) = (m for m in members if "scheduler_svc" in m.cmdline())
            scheduler.kill()
            _, errors = process.communicate(timeout=LIMIT_S)

            assert 1 == process.returncode
            assert "tandem: the scheduler was killed by SIGKILL" in errors
            all_gone(members)

    def test_executor_that_dies_is_started_again(self, tiny_model):
        """
        An executor that is killed under a stream is started again, and the stream gets the same
        tokens as an undisturbed one.
        """
        asked = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.0}
        patient = {"TANDEM_RECOVERY_TIMEOUT_S": "600"}
        with (
            command("up", tiny_model, *ANY_PORTS, env=patient) as process,
            Client(serving(process), retry=NO_RETRY) as client,
        ):
            expected = client.complete(PROMPT, **asked)
            (executor,) = (m for m in family(process) if "executor_svc" in m.cmdline())
            with paused(executor.pid), client.generate(PROMPT, **asked) as stream:
                wait_until(lambda: isinstance(next(stream), Scheduled), "a step of it")
                executor.kill()
                events = list(stream)

            ids = [i for event in events if isinstance(event, Delta) for i in event.token_ids]
            assert list(expected.token_ids) == ids
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT_S)
            assert "the executor was killed by SIGKILL" in errors
            assert "starting it again" in errors

    def test_unusable_model_is_one_line(self, tiny_model, tmp_path):
        """
        Truncated weights end the command with the executor's own sentence and exit code 2.
        """
        broken = shutil.copytree(tiny_model, tmp_path / "broken")
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:3000])
        with command("up", broken, *ANY_PORTS) as process:
            _, errors = process.communicate(timeout=LIMIT_S)

        assert 2 == process.returncode
        assert "INVALID_MODEL: " in errors
        assert "model.safetensors" in errors
        assert "Traceback" not in errors

    @pytest.mark.parametrize(
        ("broken", "options", "sentence"),
        [
            (
                "tokenizer.json",
                (),
                "INVALID_MODEL: tokenizer.json has the decoder BPEDecoder, which",
            ),
            ("chat_template.jinja", (), "INVALID_MODEL: the chat template is invalid in line 1"),
            ("", ("--scheduler-arg=--block-size=32",), "block_size is set to 32 (flag), but the"),
        ],
        ids=["decoder", "template", "block size"],
    )
    def test_what_only_the_scheduler_can_tell_is_one_line_at_once(
        self, tiny_model, tmp_path, broken, options, sentence
    ):
        """
        A model or executor that the scheduler cannot use ends the command with its sentence and
        code 2, long before the start's timeout.
        """
        folder = shutil.copytree(tiny_model, tmp_path / "model")
        if broken == "tokenizer.json":
            tokenizer = json.loads((folder / broken).read_text())
            tokenizer["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
            (folder / broken).write_text(json.dumps(tokenizer))
        elif broken:
            (folder / broken).write_text("{% if")
        with command("up", folder, *ANY_PORTS, "--start-timeout-s=9999", *options) as process:
            _, errors = process.communicate(timeout=LIMIT_S)

        assert 2 == process.returncode
        assert sentence in errors
        assert "Traceback" not in errors

    def test_taken_port_is_one_line(self, tiny_model):
        """
        A public port that is taken ends the command with ADDRESS_IN_USE, the address and exit code
        1.
        """
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with command("up", tiny_model, f"--listen={address}", *ANY_PORTS[1:]) as process:
                _, errors = process.communicate(timeout=LIMIT_S)

        assert 1 == process.returncode
        assert "ADDRESS_IN_USE: " in errors
        assert address in errors
        assert "Traceback" not in errors


@pytest.mark.slow
class TestGenerateUp:
    def test_ctrl_c_ends_everything(self, tiny_model, tmp_path):
        """
        Ctrl-C while a one-command server generates ends it with 130, and no process is left.
        """
        model = shutil.copytree(tiny_model, tmp_path / "endless")
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = ENDLESS
        (model / "config.json").write_text(json.dumps(config))
        limits = {"MODEL_LEN": ENDLESS, "NUM_BLOCKS": ENDLESS // 16}
        env = {f"TANDEM_EXECUTOR_MAX_{name}": str(most) for name, most in limits.items()}
        options = ["--max-tokens", str(ENDLESS - 1000), "--ignore-eos"]
        with command("generate", PROMPT, "--up", model, *options, env=env) as process:
            process.stdout.read(1)
            members = family(process)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT_S)

            assert 130 == process.returncode
            assert "Traceback" not in errors
            all_gone(members)

    def test_missing_model_is_one_line(self, tmp_path):
        """
        A model directory that does not exist is named, with exit code 2.
        """
        with command("generate", PROMPT, "--up", tmp_path / "nothing") as process:
            output, errors = process.communicate(timeout=LIMIT_S)

        assert (2, "") == (process.returncode, output)
        assert "INVALID_MODEL: " in errors
        assert str(tmp_path / "nothing") in errors


class TestRefusedStarts:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["--block-size=0"], "INVALID_CONFIG: block_size must be greater than 0"),
            (
                ["--max-total-tokens=4"],
                "INVALID_CONFIG: max_total_tokens must be at least max_batch_size",
            ),
            (["--config=/nowhere.json"], "INVALID_CONFIG: cannot read /nowhere.json"),
            (["--colour=red"], "INVALID_CONFIG: unrecognized arguments: --colour=red"),
        ],
        ids=["rule", "relation", "file", "flag"],
    )
    def test_wrong_configuration_is_one_line(self, arguments, line):
        """
        A scheduler with a wrong setting prints one line and exits 2.
        """
        program = (sys.executable, "-m", "scheduler_svc")
        with command(*arguments, program=program) as process:
            _, errors = process.communicate(timeout=LIMIT_S)

        assert 2 == process.returncode
        assert errors.startswith(line)
        assert 1 == errors.count("\n")


@pytest.mark.slow
class TestDemo:
    def test_two_demos_at_once_print_the_same_completion(self):
        """
        Two demos at once each stream a completion of the bundled model and exit with 0.
        """
        program = (str(ROOT / "deploy/local/demo"),)
        options = [PROMPT, "--max-tokens", "24", "--temperature", "0"]
        with (
            command(*options, program=program) as one,
            command(*options, program=program) as two,
        ):
            first, errors = one.communicate(timeout=LIMIT_S)
            second, _ = two.communicate(timeout=LIMIT_S)

        assert (0, 0) == (one.returncode, two.returncode), errors
        assert first.startswith(PROMPT)
        assert len(first) > len(PROMPT) + 10
        assert first == second

    def test_missing_python_is_a_sentence(self, tmp_path):
        """
        The demo without Python 3.11 or newer says what to install and exits with 1.
        """
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in ("bash", "env", "dirname", "basename"):
            (tools / name).symlink_to(shutil.which(name))
        outcome = subprocess.run(
            [str(ROOT / "deploy/local/demo")],
            env={"PATH": str(tools)},
            capture_output=True,
            text=True,
            check=False,
        )

        assert 1 == outcome.returncode
        assert outcome.stderr.startswith("demo: Python 3.11 or newer")
        assert 1 == outcome.stderr.count("\n")

    def test_failed_installation_is_a_sentence(self, tmp_path):
        """
        The demo says after pip's own words that pip cannot install, and exits with 1.
        """
        shutil.copytree(ROOT / "deploy/local", tmp_path / "deploy/local")
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
        outcome = subprocess.run(
            [str(tmp_path / "deploy/local/demo")],
            env=environment() | nowhere,
            capture_output=True,
            text=True,
            check=False,
        )

        assert 1 == outcome.returncode
        assert "demo: pip could not install the project" in outcome.stderr.splitlines()[-1]
        assert "" == outcome.stdout


@pytest.mark.slow
class TestBench:
    def test_load_on_a_real_server_is_measured(self, small):
        """
        `tandem bench serve` finds no error on a healthy server and orders its percentiles.
        """
        shape = ["--input-len=16", "--output-len=8", "--requests=8", "--concurrency=2"]
        shape += ["--max-time-s=600"]
        with command("bench", "serve", f"--address={small.address}", "--json", *shape) as process:
            output, errors = process.communicate(timeout=LIMIT_S)
        outcome = json.loads(output)

        assert (0, "") == (process.returncode, errors)
        assert (8, 0) == (outcome["requests"], outcome["errors"])
        assert outcome["ttft_ms"]["p50"] <= outcome["ttft_ms"]["p99"]
