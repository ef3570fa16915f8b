"""`tandem up --dp-size 2`: real executors that serve together, are killed, drained and added."""

from __future__ import annotations

import json
import shutil

import psutil
import pytest

from tandem_client import NO_RETRY, AdminClient, Client, Delta, ExecutorState
from tests import model_zoo
from tests.e2e.test_commands import ANY_PORTS, ENDLESS, PROMPT, announced, command, family, serving
from tests.waiting import wait_until

ASKED = {"ignore_eos": True, "temperature": 1.0, "seed": 7}
FEW = 50


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory):
    """A tiny model whose outputs do not end while a test runs."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    model = shutil.copytree(model_zoo.llama_mha(folder), folder.with_name("endless"))
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = ENDLESS
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def two(endless_model):
    """A command that serves with two executors: its process and what it announced."""
    limits = [f"--max-model-len={ENDLESS}", f"--max-num-blocks={ENDLESS // 16}"]
    same = ["--batch-invariant", "--no-enable-prefix-caching"]
    patient = {"TANDEM_RECOVERY_TIMEOUT_S": "600"}
    arguments = ["up", endless_model, "--dp-size=2", *ANY_PORTS, *limits, *same]
    with command(*arguments, env=patient) as process:
        address = serving(process)
        yield process, address, announced(process)


@pytest.fixture
def client(two):
    with Client(two[1], retry=NO_RETRY) as connected:
        yield connected


@pytest.fixture
def admin(two):
    """The operators' client, once both executors serve."""
    with AdminClient(two[2]["operators"].strip(), retry=NO_RETRY) as connected:
        wait_until(lambda: all_serve(connected), "both executors to serve")
        yield connected


def all_serve(admin):
    """Return whether each of both executors serves."""
    return [ExecutorState.SERVING] * 2 == [one.state for one in admin.executors()]


def busy_one(admin):
    """Return the executor that the only request runs on."""
    (one,) = wait_until(
        lambda: [one for one in admin.executors() if one.running_requests], "a running request"
    )
    return one


def read(stream, num_tokens):
    """Return the next tokens of a stream, at least so many."""
    ids: list[int] = []
    while len(ids) < num_tokens:
        event = next(stream)
        if isinstance(event, Delta):
            ids += event.token_ids
    return ids


def process_of(two, executor):
    """Return the process of an executor."""
    (found,) = (
        member
        for member in family(two[0])
        if "executor_svc" in (line := member.cmdline()) and f"--listen={executor.address}" in line
    )
    return found


@pytest.mark.slow
class TestTwoExecutors:
    def test_banner_says_how_many(self, two):
        """
        The announcement tells of two executors, and the scheduler serves with both.
        """
        assert two[2]["device"].strip().startswith("2 executors, each on cpu")
        assert two[2]["KV"].endswith("in 2 executors")

    def test_stream_goes_on_when_its_executor_is_killed(self, two, client, admin):
        """
        A stream whose executor is killed has the tokens of an undisturbed one: it goes on at the
        other executor, and the one that died is started again.
        """
        with client.generate(PROMPT, max_tokens=ENDLESS - 1000, **ASKED) as stream:
            ids = read(stream, FEW)
            busy = busy_one(admin)
            process_of(two, busy).kill()
            wait_until(lambda: busy_one(admin).address != busy.address, "the other executor")
            # Tokens of before the move may still be on their way: those that follow them are read.
            steps = sum(one.steps for one in admin.executors())
            ids += read(stream, max(FEW, steps - len(ids)) + FEW)
        wait_until(lambda: all_serve(admin), "the executor that was killed")

        expected = client.complete(PROMPT, max_tokens=len(ids), **ASKED)
        assert list(expected.token_ids) == ids
        (again,) = (one for one in admin.executors() if one.address == busy.address)
        assert busy.boot_id != again.boot_id
        assert busy.losses + 1 == again.losses

    def test_stream_goes_on_when_its_executor_is_drained(self, two, client, admin):
        """
        A stream whose executor is drained moves without loss; the executor is free then, and serves
        again once it is added.
        """
        where = f"--admin-address={two[2]['operators'].strip()}"
        with client.generate(PROMPT, max_tokens=ENDLESS - 1000, **ASKED) as stream:
            ids = read(stream, FEW)
            busy = busy_one(admin)
            with command("executors", "drain", busy.address, "--grace-s=0", where) as drain:
                said, errors = drain.communicate()
            assert f"{busy.address} is drained; 1 moved." in said, errors
            states = {one.address: one.state for one in admin.executors()}
            assert ExecutorState.DRAINED is states[busy.address]
            assert busy.address != busy_one(admin).address
            steps = sum(one.steps for one in admin.executors())
            ids += read(stream, max(FEW, steps - len(ids)) + FEW)
        assert psutil.STATUS_ZOMBIE != process_of(two, busy).status()
        admin.add_executor(busy.address)
        wait_until(lambda: all_serve(admin), "the executor that was drained")

        expected = client.complete(PROMPT, max_tokens=len(ids), **ASKED)
        assert list(expected.token_ids) == ids
