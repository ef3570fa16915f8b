"""AdminService, health, reflection and the metrics page, the core played by the test."""

import asyncio
import json

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from scheduler_svc.frontend import core_client
from scheduler_svc.frontend.operators.metrics import HISTOGRAMS, SIZES
from scheduler_svc.ipc.messages import Availability
from scheduler_svc.ipc.snapshot import (
    ConfigEntry,
    ConfigSnapshot,
    DrainResult,
    HistogramSnapshot,
    MetricsSnapshot,
    ProcessReport,
    encode_json,
)
from tandem.admin.v1 import admin_service_pb2 as pb
from tandem.admin.v1 import stats_pb2
from tandem.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tandem.errors import HandedOver, InvalidModel
from tandem.installation import version
from tests.scheduler_svc.frontend.calls import error_of
from tests.scheduler_svc.frontend.fake_core import model, running_frontend, serve, until, within

STATS = {
    field.name: at + 1 if field.type != field.TYPE_BOOL else True
    for at, field in enumerate(stats_pb2.GetStatsResponse.DESCRIPTOR.fields)
} | {
    "refused_by_limit": {"max_num_seqs": 3},
    "schedule_policy": "lpm",
    "executor_address": "host:1",
    "executor_refusal": "no",
    "model": "tiny",
    "dtype": "float32",
}
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)


@pytest.fixture
async def admin(frontend):
    async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
        yield AdminServiceStub(channel)


class TestAdmin:
    async def test_every_statistic_is_passed_on(self, frontend, admin):
        """
        GetStats has all values of the core's snapshot.
        """
        frontend.core.answers["stats"] = lambda _: encode_json(stats_pb2.GetStatsResponse(**STATS))
        answer = await within(admin.GetStats(pb.GetStatsRequest()))
        assert stats_pb2.GetStatsResponse(**STATS) == answer

    @pytest.mark.parametrize(("sent", "asked"), [({}, 30.0), ({"grace_s": 0.0}, 0.0)])
    async def test_drain_waits_as_long_as_asked(self, frontend, admin, sent, asked):
        """
        Drain passes its grace on, 30 s if unset, and tells how many requests are left.
        """
        arguments = []

        def answer(argument: bytes) -> bytes:
            arguments.append(json.loads(argument))
            return encode_json(DrainResult(remaining_requests=2))

        frontend.core.answers["drain"] = answer
        assert 2 == (await within(admin.Drain(pb.DrainRequest(**sent)))).remaining_requests
        assert [{"grace_s": asked}] == arguments

    @pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf")])
    async def test_senseless_grace_is_refused(self, admin, grace_s):
        """
        A grace_s that is negative or not finite is refused.
        """
        error = await error_of(admin.Drain(pb.DrainRequest(grace_s=grace_s)))
        assert ("INVALID_PARAMETER", "grace_s") == (error.reason, error.field)

    async def test_configuration_is_listed_in_order(self, frontend, admin):
        """
        GetConfig lists name, value and source of every setting.
        """
        entries = [("block_size", "16", "default"), ("window", "2", "flag")]
        snapshot = ConfigSnapshot(
            tuple(ConfigEntry(name=n, json_value=v, source=s) for n, v, s in entries)
        )
        frontend.core.answers["config"] = lambda _: encode_json(snapshot)
        answer = await within(admin.GetConfig(pb.GetConfigRequest()))
        assert entries == [(e.name, e.json_value, e.source) for e in answer.entries]

    async def test_silent_core_is_unavailable(self, tmp_path):
        """
        A core that does not answer makes the call UNAVAILABLE instead of hanging, with a time after
        which to ask again and a reason of its own: nothing stops.
        """
        async with running_frontend(tmp_path, query_timeout_s=0.05) as frontend:
            frontend.core.answers["config"] = lambda _: None
            async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
                error = await error_of(AdminServiceStub(channel).GetConfig(pb.GetConfigRequest()))
        assert ("UNAVAILABLE", "CORE_TIMEOUT", 1.0) == (
            error.code,
            error.reason,
            error.retry_after_s,
        )
        assert "the scheduler core did not answer 'config' within 0.05 s" == error.message


async def check(stub: health_pb2_grpc.HealthStub, name: str) -> int:
    answer = await within(stub.Check(health_pb2.HealthCheckRequest(service=name)))
    return answer.status


class TestHealth:
    async def test_watch_follows_every_change(self, tmp_path, model_dir):
        """
        The service tandem.ready is SERVING once a model can be used, and not while draining; a
        watcher sees each change.
        """
        async with running_frontend(tmp_path) as frontend:
            stub = health_pb2_grpc.HealthStub(frontend.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="tandem.ready"))
            seen = [(await within(watch.read())).status]
            await serve(frontend, model(model_dir))
            seen.append((await within(watch.read())).status)
            draining = Availability(executor_attached=True, ready=True, draining=True)
            await frontend.core.send(draining)
            seen.append((await within(watch.read())).status)
            watch.cancel()
            assert [NOT_SERVING, SERVING, NOT_SERVING] == seen
            assert SERVING == await check(stub, "")

    async def test_stuck_step_shows_in_progress_alone(self, frontend):
        """
        The service tandem.progress says whether steps complete in time; tandem.ready does not.
        """
        stub = health_pb2_grpc.HealthStub(frontend.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="tandem.progress"))
        assert SERVING == (await within(watch.read())).status
        stuck = Availability(executor_attached=True, ready=True, draining=False, progressing=False)
        await frontend.core.send(stuck)
        assert NOT_SERVING == (await within(watch.read())).status
        watch.cancel()
        ready = stub.Watch(health_pb2.HealthCheckRequest(service="tandem.ready"))
        while (await within(ready.read())).status != SERVING:  # ready once the tokenizer is loaded
            pass
        ready.cancel()

    @pytest.mark.slow
    async def test_late_core_shows_in_progress_alone(self, tmp_path, model_dir, monkeypatch):
        """
        A core that says nothing for a while makes no progress, long before it counts as dead; once
        it answers again it does.
        """
        monkeypatch.setattr(core_client, "LATE_AFTER_S", 1.5)
        monkeypatch.setattr(core_client, "PING_INTERVAL_S", 0.05)
        async with running_frontend(tmp_path, core_timeout_s=600.0) as frontend:
            await serve(frontend, model(model_dir))
            stub = health_pb2_grpc.HealthStub(frontend.channel)
            answer = frontend.core.answers["stats"]
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="tandem.progress"))
            for answering, status in ((lambda _: None, NOT_SERVING), (answer, SERVING)):
                frontend.core.answers["stats"] = answering
                while (await within(watch.read())).status != status:
                    pass
                assert SERVING == await check(stub, "")
            watch.cancel()
            assert SERVING == await check(stub, "tandem.ready")

    async def test_silent_core_fails_liveness(self, tmp_path, model_dir):
        """
        A core that stopped answering makes everything NOT_SERVING.
        """
        async with running_frontend(tmp_path, core_timeout_s=0.2) as frontend:
            frontend.core.answers["stats"] = lambda _: None
            await serve(frontend, model(model_dir))
            stub = health_pb2_grpc.HealthStub(frontend.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
            while (await within(watch.read())).status != NOT_SERVING:
                pass
            watch.cancel()
            assert NOT_SERVING == await check(stub, "tandem.ready")

    async def test_stuck_frontend_fails_liveness_everywhere(self, frontend):
        """
        Every frontend reports that the service is not alive if the core does not hear one of them.
        """
        stub = health_pb2_grpc.HealthStub(frontend.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert SERVING == (await within(watch.read())).status
        stuck = Availability(
            executor_attached=True, ready=True, draining=False, frontends_alive=False
        )
        await frontend.core.send(stuck)
        assert NOT_SERVING == (await within(watch.read())).status
        watch.cancel()

    @pytest.mark.slow
    async def test_unusable_tokenizer_is_not_ready(self, tmp_path):
        """
        A model with a tokenizer that cannot be used is not ready, whatever the core says.
        """
        (tmp_path / "tokenizer.json").write_text("{")
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(tmp_path))
            stub = health_pb2_grpc.HealthStub(frontend.channel)
            await until(lambda: frontend.client.availability.ready)
            with pytest.raises(InvalidModel):
                await within(frontend.client.served.get())
            assert NOT_SERVING == await check(stub, "tandem.ready")

    async def test_unknown_name_is_not_found(self, frontend):
        """
        Check answers NOT_FOUND and Watch SERVICE_UNKNOWN for an unknown name.
        """
        stub = health_pb2_grpc.HealthStub(frontend.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(stub, "nonsense")
        assert grpc.StatusCode.NOT_FOUND == caught.value.code()
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="nonsense"))
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert unknown == (await within(watch.read())).status
        watch.cancel()


class TestReflection:
    @pytest.mark.parametrize(
        ("port", "services"),
        [
            ("address", {"tandem.inference.v1.InferenceService"}),
            (
                "admin_address",
                {"tandem.admin.v1.AdminService", "externalscaler.ExternalScaler"},
            ),
        ],
    )
    async def test_each_port_lists_its_services(self, frontend, port, services):
        """
        Reflection names the port's own services and health.
        """
        async with grpc.aio.insecure_channel(getattr(frontend.servers, port)) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            answer = await within(call.read())
            call.cancel()
        names = {entry.name for entry in answer.list_services_response.service}
        assert (
            services
            | {
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            == names
        )


def metrics_snapshot() -> MetricsSnapshot:
    histogram = HistogramSnapshot(
        upper_bounds=(0.1, 1.0), cumulative_counts=(2, 5), count=6, total=4.5
    )
    return MetricsSnapshot(
        stats=stats_pb2.GetStatsResponse(
            running_requests=3,
            waiting_requests=4,
            used_blocks=25,
            free_blocks=60,
            cached_blocks=15,
            total_blocks=100,
            token_usage=0.25,
            prefill_tokens=70,
            output_tokens=80,
            preemptions=9,
            retractions=7,
            prefix_cache_lookup_tokens=200,
            prefix_cache_hit_tokens=50,
            paused_requests=2,
            swapped_requests=1,
            host_blocks=8,
            used_host_blocks=6,
            swapped_out_blocks=21,
            swapped_in_blocks=22,
            swap_fallbacks=23,
            executor_sessions=31,
            executor_reattachments=32,
            executor_losses=33,
            steps_sent_again=34,
            recomputed_tokens=35,
            state_hash_mismatches=36,
            executor_fencings=37,
            executor_deaths=38,
            suspected_requests=39,
            poison_requests=40,
            out_of_memory_steps=41,
            queued_tokens=123,
            new_token_ratio=0.5,
            refused_by_limit={"max_num_seqs": 2, "max_tenant_requests": 3},
            schedule_policy="lpm",
        ),
        ready=True,
        finished_by_reason={"EOS": 5, "MAX_TOKENS": 6},
        failed_by_reason={"INVALID_LOGITS": 1},
        refused_by_reason={"QUEUE_FULL": 2},
        histograms=dict.fromkeys((*HISTOGRAMS, *SIZES), histogram),
        prompt_tokens=60,
        cached_prompt_tokens=10,
        model_name="small",
        model_fingerprint="rev-1",
        progressing=False,
        max_num_seqs=256,
        processes=(
            ProcessReport(name="core", cpu_s=1.5, resident_bytes=4096),
            ProcessReport(
                name="frontend-0",
                cpu_s=2.5,
                resident_bytes=8192,
                open_streams=7,
                failed_calls={"SLOW_CONSUMER": 2},
                certificates={"server.pem": 1.9e9},
                refused_files={"server.pem": True, "tokens": False},
            ),
        ),
    )


async def http(address: str, raw: bytes) -> tuple[str, str]:
    """Return first line and body of an answer."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    answer = (await within(reader.read())).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


class TestMetrics:
    async def test_page_has_every_value_under_its_name(self, frontend):
        """
        The page is valid Prometheus text with the documented names and the core's values.
        """
        frontend.core.answers["metrics"] = lambda _: encode_json(metrics_snapshot())
        page = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        status, body = await http(frontend.servers.metrics_address, page)
        assert "HTTP/1.1 200 OK" == status
        samples = {
            (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }
        expected = {
            ("tandem_requests_running",): 3,
            ("tandem_requests_waiting",): 4,
            ("tandem_kv_cache_usage_ratio",): 0.25,
            ("tandem_ready",): 1,
            ("tandem_preemptions_total",): 9,
            ("tandem_prompt_tokens_total",): 60,
            ("tandem_prompt_tokens_cached_total",): 10,
            ("tandem_prefill_tokens_total",): 70,
            ("tandem_generation_tokens_total",): 80,
            ("tandem_requests_total", "finished", "EOS"): 5,
            ("tandem_requests_total", "finished", "MAX_TOKENS"): 6,
            ("tandem_requests_total", "failed", "INVALID_LOGITS"): 1,
            ("tandem_requests_total", "refused", "QUEUE_FULL"): 2,
            ("tandem_time_to_first_token_seconds_bucket", "0.1"): 2,
            ("tandem_time_to_first_token_seconds_bucket", "+Inf"): 6,
            ("tandem_inter_token_latency_seconds_count",): 6,
            ("tandem_inter_token_latency_seconds_sum",): 4.5,
            ("tandem_model_info", "small", "rev-1"): 1,
            ("tandem_kv_blocks_cached",): 15,
            ("tandem_prefix_cache_lookup_tokens_total",): 200,
            ("tandem_prefix_cache_hit_tokens_total",): 50,
            ("tandem_retractions_total",): 7,
            ("tandem_requests_paused",): 2,
            ("tandem_requests_swapped",): 1,
            ("tandem_host_blocks",): 8,
            ("tandem_host_blocks_used",): 6,
            ("tandem_swapped_out_blocks_total",): 21,
            ("tandem_swapped_in_blocks_total",): 22,
            ("tandem_swap_fallbacks_total",): 23,
            ("tandem_executor_sessions_total",): 31,
            ("tandem_executor_reattachments_total",): 32,
            ("tandem_executor_losses_total",): 33,
            ("tandem_steps_sent_again_total",): 34,
            ("tandem_recomputed_tokens_total",): 35,
            ("tandem_state_hash_mismatches_total",): 36,
            ("tandem_executor_fencings_total",): 37,
            ("tandem_executor_deaths_total",): 38,
            ("tandem_requests_suspected",): 39,
            ("tandem_poison_requests_total",): 40,
            ("tandem_out_of_memory_steps_total",): 41,
            ("tandem_queued_tokens",): 123,
            ("tandem_new_token_ratio",): 0.5,
            ("tandem_refusals_total", "max_num_seqs"): 2,
            ("tandem_refusals_total", "max_tenant_requests"): 3,
            ("tandem_schedule_time_seconds_bucket", "0.1", "lpm"): 2,
            ("tandem_schedule_time_seconds_count", "lpm"): 6,
            ("tandem_request_queue_time_seconds_count",): 6,
            ("tandem_e2e_request_latency_seconds_count",): 6,
            ("tandem_request_prompt_tokens_count",): 6,
            ("tandem_request_generation_tokens_count",): 6,
            ("tandem_step_tokens_count",): 6,
            ("tandem_progressing",): 0,
            ("tandem_frontends_alive",): 1,
            ("tandem_requests_limit",): 256,
            ("tandem_process_cpu_seconds_total", "core"): 1.5,
            ("tandem_process_resident_memory_bytes", "frontend-0"): 8192,
            ("tandem_open_streams", "frontend-0"): 7,
            ("tandem_call_failures_total", "frontend-0", "SLOW_CONSUMER"): 2,
            ("tandem_certificate_expiration_timestamp_seconds", "server.pem", "frontend-0"): 1.9e9,
            ("tandem_file_reload_failed", "server.pem", "frontend-0"): 1,
            ("tandem_file_reload_failed", "tokens", "frontend-0"): 0,
            ("tandem_build_info", version()): 1,
        }
        assert expected == {key: samples.get(key) for key in expected}

    @pytest.mark.parametrize(
        ("raw", "status"),
        [
            (b"GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
            (b"\xff\xfe\r\n\r\n", "HTTP/1.1 400 Bad Request"),
            (b"x" * 40_000 + b"\r\n\r\n", "HTTP/1.1 431 Request Header Fields Too Large"),
        ],
        ids=["path", "method", "garbage", "huge"],
    )
    async def test_anything_else_gets_a_plain_answer(self, frontend, raw, status):
        """
        GET /metrics is the only page; garbage and huge heads are answered and dropped.
        """
        assert status == (await http(frontend.servers.metrics_address, raw))[0]

    async def test_lost_core_makes_the_page_unavailable(self, frontend):
        """
        The page is 503 without the core, and shows no old numbers.
        """
        frontend.client.lose(HandedOver("the scheduler is stopping"))
        status, body = await http(
            frontend.servers.metrics_address, b"GET /metrics HTTP/1.1\r\n\r\n"
        )
        assert ("HTTP/1.1 503 Service Unavailable", "the scheduler is stopping\n") == (status, body)
