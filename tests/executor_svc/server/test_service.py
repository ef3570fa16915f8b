"""Reports of an executor about itself, and their times."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from collections import defaultdict

import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.numpy import load_file

from executor_svc.model.files.tokenizer_files import TokenizerFile, chunks
from executor_svc.server.loaded import credit
from executor_svc.server.progress import Progress
from tandem.errors import AddressInUse, ExecutorLoading, InvalidConfig
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.link import MAX_CHUNK_BYTES, step_cost
from tandem.link.batch import Batch
from tandem.link.step_cost import ALWAYS_ALLOWED_S, LEARN_EVERY, SLACK, StepWork
from tests.executor_svc.server.harness import (
    DEADLINE_S,
    StepClient,
    refusal,
    start_server,
    wait_until,
)
from tests.model_zoo import EOS_TOKEN_ID, MAX_POSITIONS, VOCAB_SIZE

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(("num_stages", "num_steps"), [(1, 16), (8, 16), (9, 18), (64, 128)])
def test_credit_keeps_all_stages_busy(num_stages, num_steps):
    """
    A scheduler may send 16 steps ahead, and two for each stage where that is more.
    """
    assert num_steps == credit(num_stages)


def health(running, name):
    stub = health_pb2_grpc.HealthStub(running.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S).status


class TestDescribe:
    def test_limits_and_model_are_the_real_ones(self, start, model_dir):
        """
        Describe gives the flags' limits, the model's vocabulary and ends, and KV bytes by formula.
        """
        about = start(
            "--block-size=8",
            "--max-num-blocks=40",
            "--max-batch-size=3",
            "--max-total-tokens=64",
            "--max-model-len=100",
            "--model-name=tiny",
        ).describe()
        assert (8, 40, 3, 6) == (
            about.block_size,
            about.num_blocks,
            about.max_batch_size,
            about.num_slots,
        )
        assert (64, 100) == (about.max_total_tokens, about.max_model_len)
        assert ("tiny", "LlamaForCausalLM") == (about.model_name, about.architecture)
        assert ("float32", "cpu") == (about.dtype, about.device)
        assert VOCAB_SIZE == about.vocab_size
        assert [EOS_TOKEN_ID] == np.frombuffer(about.eos_token_ids, "<i4").tolist()
        # block x layers x key heads x head size x (keys, values) x bytes
        assert 8 * 2 * 1 * 16 * 2 * 4 == about.kv_bytes_per_block
        stored = load_file(model_dir / "model.safetensors").values()
        assert sum(tensor.size for tensor in stored) == about.num_parameters
        assert torch.get_num_threads() == about.num_threads
        assert 64 == len(about.model_fingerprint)
        assert 1 <= about.max_inflight_steps
        assert 200 == about.heartbeat_interval_ms

    def test_swap_space_becomes_host_blocks(self, start, executor):
        """
        Describe gives the whole blocks that fit into the swap space; without a setting there are none.
        """
        about = start(f"--swap-space-gb={10.5 * executor.describe().kv_bytes_per_block / 2**30}")
        assert (0, 10) == (executor.describe().num_host_blocks, about.describe().num_host_blocks)

    def test_default_length_gives_way_to_the_model(self, executor):
        """
        Without a setting the longest sequence is the smaller of default and model.
        """
        assert MAX_POSITIONS == executor.describe().max_model_len

    def test_length_of_a_preset_gives_way_to_the_model(self, start):
        """
        A preset is a starting point: its longest sequence gives way like a default, its other limits hold.
        """
        about = start("--preset=long-context").describe()
        assert (MAX_POSITIONS, 32, 2048) == (
            about.max_model_len,
            about.block_size,
            about.num_blocks,
        )

    def test_length_that_was_set_does_not_give_way(self, model_dir):
        """
        A set length beyond the model's is an error that names both and the flag.
        """
        running = start_server(model_dir, f"--max-model-len={MAX_POSITIONS + 1}")
        running.server.stop()
        assert isinstance(running.fatal[0], InvalidConfig)
        assert (
            f"max_model_len is set to {MAX_POSITIONS + 1} (--max-model-len), but the model supports "
            f"at most {MAX_POSITIONS} tokens (max_position_embeddings): lower max_model_len to "
            f"{MAX_POSITIONS} or less" == running.fatal[0].message
        )

    def test_generation_defaults_are_those_of_the_model(self, start, model_dir, tmp_path):
        """
        Values of generation_config.json travel; what it leaves out stays unset.
        """
        directory = shutil.copytree(model_dir, tmp_path / "model")
        path = directory / "generation_config.json"
        recommended = {"temperature": 0.5, "top_k": 0, "repetition_penalty": 1.25}
        path.write_text(json.dumps(recommended | {"eos_token_id": [3, 5]}))
        about = start(directory=directory).describe()
        assert 0.5 == about.generation_defaults.temperature
        assert 1.25 == about.generation_defaults.repetition_penalty
        assert not about.generation_defaults.HasField("min_p")
        assert about.generation_defaults.HasField("top_k")
        assert not about.generation_defaults.HasField("top_p")
        assert [3, 5, EOS_TOKEN_ID] == np.frombuffer(about.eos_token_ids, "<i4").tolist()

    def test_two_processes_have_two_boots(self, start):
        """
        boot_id is new with every start, the fingerprint is not.
        """
        first, second = start().describe(), start().describe()
        assert first.boot_id != second.boot_id
        assert first.model_fingerprint == second.model_fingerprint


class TestLoading:
    def test_calls_before_the_model_is_loaded_say_so(self, start):
        """
        The port answers at once: EXECUTOR_LOADING with a retry delay, alive but not ready.
        """
        go_on = threading.Event()
        running = start(hold_loading=go_on)
        calls = (
            running.describe,
            running.open_session,
            lambda: list(running.stub.GetTokenizer(executor_pb2.GetTokenizerRequest())),
        )
        for call in calls:
            error = refusal(call)
            assert isinstance(error, ExecutorLoading)
            assert 1.0 == error.retry_after_s
        assert (SERVING, NOT_SERVING) == (health(running, ""), health(running, "tandem.ready"))
        go_on.set()
        wait_until(lambda: health(running, "tandem.ready") == SERVING)
        assert 1 == running.open_session()

    def test_port_is_not_shared_with_anyone(self, executor):
        """
        A socket that asks to share the port may not bind it: half the connections would go there.
        """
        host, _, port = executor.server.address.rpartition(":")
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="Address already in use"):
                other.bind((host, int(port)))

    def test_port_in_use_is_refused_with_what_to_do(self, executor, model_dir):
        """
        A second executor on the same port gets ADDRESS_IN_USE with the address, not half its connections.
        """
        with pytest.raises(AddressInUse) as refused:
            start_server(model_dir, "--listen", executor.server.address)
        assert (
            f"listen {executor.server.address} is in use by another process: stop it or choose "
            "another --listen" == refused.value.message
        )


class TestUndecodable:
    @pytest.mark.parametrize("method", ["Describe", "OpenSession", "GetTokenizer", "Profile"])
    def test_bytes_that_are_no_message_are_refused_typed(self, executor, method):
        """
        Undecodable bytes are INVALID_PARAMETER, and the next call is served.
        """
        path = f"/tandem.executor.v1.ExecutorService/{method}"
        call = executor.channel.unary_stream(path)
        error = refusal(lambda: list(call(b"\x0a\x05ab", timeout=DEADLINE_S)))
        assert ("INVALID_PARAMETER", "INVALID_ARGUMENT") == (error.reason, error.code)
        assert executor.describe().vocab_size == VOCAB_SIZE


class TestHealth:
    def test_three_names_serve_when_warm_and_ready_ends_first(self, start):
        """
        Liveness, readiness and progress serve once loaded; stopping turns readiness off for watchers.
        """
        running = start()
        assert {SERVING} == {health(running, n) for n in ("", "tandem.ready", "tandem.progress")}
        request = health_pb2.HealthCheckRequest(service="tandem.ready")
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(request, timeout=DEADLINE_S)
        assert SERVING == next(watch).status
        stopper = threading.Thread(target=running.server.stop)
        stopper.start()
        assert NOT_SERVING == next(watch).status
        watch.cancel()
        stopper.join(timeout=DEADLINE_S)
        assert not stopper.is_alive()

    def test_reflection_lists_the_services(self, executor):
        """
        A tool without protos finds the service by reflection.
        """
        stub = reflection_pb2_grpc.ServerReflectionStub(executor.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S))
        names = {service.name for service in answer.list_services_response.service}
        assert {"tandem.executor.v1.ExecutorService", "grpc.health.v1.Health"} <= names


def prompt(num_tokens: int) -> Batch:
    """A batch that computes the beginning of one prompt."""
    columns = {
        "row_slot": np.zeros(1, np.int32),
        "row_start": np.zeros(1, np.int32),
        "row_num_tokens": np.array([num_tokens], np.int32),
    }
    return Batch(**columns)


class TestProgress:
    def test_first_steps_have_ten_seconds(self):
        """
        Without experience a step counts as stuck after ten seconds, and no longer once it is over.
        """
        progress = Progress()
        assert not progress.is_stuck(1e6)
        progress.start(prompt(100), now_s=50.0)
        assert not progress.is_stuck(50.0 + ALWAYS_ALLOWED_S)
        assert progress.is_stuck(50.1 + ALWAYS_ALLOWED_S)
        progress.end()
        assert not progress.is_stuck(1e6)

    def test_slow_models_have_twenty_times_what_steps_took(self):
        """
        Later a step may take 20 times what its work predicts, which is at most twice what it took before.
        """
        progress = Progress()
        progress.learn(prompt(10), 20.0)
        progress.start(prompt(10), now_s=0.0)
        assert not progress.is_stuck(SLACK * 20.0)
        assert progress.is_stuck(2 * SLACK * 20.0 + 1)

    def test_quick_steps_teach_now_and_then(self):
        """
        One in sixteen steps that take no time is learned from, so that the others cost nothing.
        """
        progress = Progress()
        for _ in range(LEARN_EVERY - 1):
            progress.learn(prompt(10), 0.04)
        assert 0.0 == progress._cost.predict_s(StepWork(10.0, 55.0))
        progress.learn(prompt(10), 0.04)
        assert progress._cost.predict_s(StepWork(10.0, 55.0)) > 0.0

    def test_step_that_hangs_turns_progress_off_until_it_goes_on(self, executor, monkeypatch):
        """
        tandem.progress stops serving while a step is stuck, and liveness does not.
        """
        monkeypatch.setattr(step_cost, "ALWAYS_ALLOWED_S", 0.3)
        client = StepClient(executor)
        stream = client.attach()
        executor.runner.gate.clear()
        stream.send(client.plan())
        wait_until(lambda: health(executor, "tandem.progress") == NOT_SERVING)
        assert SERVING == health(executor, "")
        executor.runner.gate.set()
        wait_until(lambda: health(executor, "tandem.progress") == SERVING)

    def test_process_without_heartbeats_ends(self, executor, monkeypatch):
        """
        An error in the thread of the heartbeats is as fatal as one in the runner's.
        """

        def beat() -> None:
            raise ValueError("no pulse")

        monkeypatch.setattr(executor.server._link, "beat", beat)
        wait_until(lambda: bool(executor.fatal))
        assert ["INTERNAL"] == [error.reason for error in executor.fatal]


class TestTokenizer:
    def test_files_arrive_whole_with_their_hash(self, executor, model_dir):
        """
        GetTokenizer streams each file once, chunks in order, its sha256 on the last.
        """
        content, digests = defaultdict(bytes), {}
        for part in executor.stub.GetTokenizer(
            executor_pb2.GetTokenizerRequest(), timeout=DEADLINE_S
        ):
            assert part.name not in digests
            content[part.name] += part.chunk
            if part.sha256:
                digests[part.name] = part.sha256
        assert {"tokenizer.json", "tokenizer_config.json"} <= set(content)
        for name in content:
            assert (model_dir / name).read_bytes() == content[name]
            assert hashlib.sha256(content[name]).hexdigest() == digests[name]

    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            (0, [0]),
            (1, [1]),
            (MAX_CHUNK_BYTES, [MAX_CHUNK_BYTES]),
            (MAX_CHUNK_BYTES + 5, [MAX_CHUNK_BYTES, 5]),
        ],
    )
    def test_chunks_are_at_most_a_mebibyte(self, size, expected):
        """
        A file is cut at each MiB; an empty one is one empty chunk with its hash.
        """
        content = bytes(size)
        parts = list(chunks((TokenizerFile("tokenizer.json", content),)))
        assert expected == [len(part.chunk) for part in parts]
        assert ["", hashlib.sha256(content).hexdigest()][-len(parts) :] == [p.sha256 for p in parts]
