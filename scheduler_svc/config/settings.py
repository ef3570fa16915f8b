"""
The scheduler's settings: one schema for files, environment and flags (`tandem.settings` reads
them).

The seven engine limits are those of `tandem.engine_config.EngineConfig`, with its rules and texts.
A limit that is not set follows the executor. One that is set lowers the executor's; an executor
with a smaller max_num_blocks or max_model_len, or another block_size, is refused (`limits_on`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from scheduler_svc.config.scheduling import SchedulingSettings
from scheduler_svc.config.security import ExecutorSecuritySettings, PortSecuritySettings
from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.ipc.snapshot import ConfigEntry, ConfigSnapshot
from tandem.engine_config import EngineConfig
from tandem.errors import IncompatibleExecutor, InvalidConfig
from tandem.link import MAX_LEASE_MS
from tandem.settings.options import Group
from tandem.settings.program import Program
from tandem.settings.reader import read_settings
from tandem.settings.schema import (
    Address,
    Addresses,
    BlockSize,
    Loaded,
    LogSettings,
    MaxBatchSize,
    MaxModelLen,
    MaxTotalTokens,
    OptionGroup,
    ServiceSettings,
    SocketAddress,
    TcpAddress,
)

_DEFAULTS = EngineConfig()
_NAME = "dns:"


class _EngineLimits(OptionGroup):
    """Engine limits, which are settings of both services."""

    group: ClassVar[Group] = Group.LIMITS

    block_size: BlockSize = Field(
        _DEFAULTS.block_size, description="tokens per KV block; must equal the executor's"
    )
    max_num_blocks: int | None = Field(
        None, description="most KV blocks to use; default: the executor's, which are the most"
    )
    max_batch_size: MaxBatchSize = Field(
        _DEFAULTS.max_batch_size, description="most sequences in one step"
    )
    max_num_seqs: int = Field(
        _DEFAULTS.max_num_seqs,
        description="most requests in the system, waiting ones included; more are refused (vLLM's "
        "max_num_seqs is --max-batch-size: so many run, and others wait)",
    )
    max_model_len: MaxModelLen = Field(
        None,
        description="most tokens of prompt plus output; default: the executor's, which is the most",
    )
    max_total_tokens: MaxTotalTokens = Field(
        _DEFAULTS.max_total_tokens, description="most tokens computed in one step"
    )
    memory_threshold: float = Field(
        _DEFAULTS.memory_threshold,
        description="share of KV blocks in use, 0 to 1, at which no prompt is admitted",
    )


class _AddressSettings(OptionGroup):
    """Addresses that the scheduler listens on, and its executors'."""

    group: ClassVar[Group] = Group.ADDRESSES

    executor: Addresses = Field(
        "127.0.0.1:50061",
        description="gRPC address of the executor; several, comma-separated, serve together, as do "
        "all that dns:///NAME:PORT means, which is looked up again and again",
    )
    standby: Addresses | None = Field(
        None,
        description="addresses of executors that step in where one of --executor is lost, or other "
        "addresses of the same executors; empty for none",
    )
    listen: Address = Field(
        "127.0.0.1:50051", description="public gRPC address; port 0 takes a free one"
    )
    admin_listen: Address | None = Field(
        "127.0.0.1:50052", description="operators' gRPC address; empty for none"
    )
    metrics_listen: TcpAddress | None = Field(
        "127.0.0.1:9464", description="HTTP address of /metrics; empty for none"
    )
    local_listen: SocketAddress | None = Field(
        None,
        description="unix socket for the program that starts this service: this user alone can "
        "open it, and calls of both gRPC services need no TLS and no credential there",
    )


class SchedulerSettings(
    _AddressSettings,
    PortSecuritySettings,
    ExecutorSecuritySettings,
    SchedulingSettings,
    _EngineLimits,
    LogSettings,
    ServiceSettings,
):
    """Settings of one scheduler service; validated where they are read."""

    group: ClassVar[Group] = Group.SERVICE

    frontends: int = Field(1, ge=1, le=64, description="frontend processes that share --listen")
    max_message_bytes: int = Field(
        4 * 1024 * 1024,
        ge=65_536,
        description="largest request message a client may send, bytes; 4 for each token id of "
        "prompt and resumed outputs, so that the default holds a million",
    )
    undecoded_share: float = Field(
        0.667,
        gt=0,
        le=1,
        description="share of the 96 MiB of large messages that may wait to be decoded which one "
        "connection alone may have; several have less each, and some is left for others",
    )
    max_streams_per_connection: int = Field(
        1024, ge=1, description="most calls at a time on one connection; a client holds back more"
    )
    max_connection_age_s: float | None = Field(
        None,
        gt=0,
        description="seconds after which a connection takes no more calls, so that clients connect "
        "anew, to other servers behind a balancer; default: no limit",
    )
    max_connection_age_grace_s: float = Field(
        600.0,
        ge=0,
        description="seconds that the calls of such a connection may go on; then they break, and "
        "clients resume them",
    )
    stall_deadline_s: float = Field(
        60.0,
        gt=0,
        description="seconds that a message may wait for a client that does not read; then its "
        "request alone ends SLOW_CONSUMER",
    )
    stream_buffer_bytes: int = Field(
        1024 * 1024,
        ge=4096,
        description="most output of one request that waits for its client, merged: 4 bytes a "
        "token, 128 for each log probability; past it the request ends SLOW_CONSUMER",
    )

    recovery_timeout_s: float = Field(
        60.0, gt=0, description="seconds that requests wait for a lost executor before they fail"
    )
    lost_after_s: float = Field(
        30.0,
        gt=0,
        description="seconds of silence, or of a stuck step, after which an executor is given up; "
        "one that is back earlier has lost nothing",
    )
    move_after_s: float = Field(
        2.0,
        gt=0,
        description="seconds of silence after which an executor's requests move, where others "
        "serve beside it; it starts empty when it is back",
    )
    ready_grace_s: float = Field(
        2.0,
        gt=0,
        description="seconds without a sign of life from the executor before readiness turns off",
    )
    lease_ms: int = Field(
        10_000,
        ge=1000,
        le=MAX_LEASE_MS,
        description="milliseconds of silence after which another scheduler may take the executor",
    )
    scheduler_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="name of this scheduler to executors, the same at every start; default: host "
        "name and public address",
    )
    take_over: bool = Field(
        False,
        description="take the executor from another scheduler that holds it, once, at the start; "
        "not for unattended starts",
    )
    drain_grace_s: float = Field(
        30.0, ge=0, description="seconds that requests may go on after SIGTERM"
    )

    dry_run: bool = Field(False, description="print the limits that are known here, and exit")
    ready_file: Path | None = Field(
        None, description="file to write addresses and pid to, as JSON, once clients can connect"
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]+/?$",
        description="URL of an OpenTelemetry collector, as http://HOST:4317, to which spans of "
        "requests go; needs the extra `tracing`; default: that of OTEL_EXPORTER_OTLP_ENDPOINT, "
        "else none",
    )
    traced_steps_per_s: int = Field(
        10,
        ge=0,
        le=10_000,
        description="most spans of steps in a second, with --otlp-endpoint, on average; each has a "
        "link to every traced request that it computed; 0: none",
    )
    logging_step_interval: int = Field(
        0,
        ge=0,
        description="steps from one line in the log on a step's time, shape and load to the next; "
        "0: none",
    )

    @property
    def executor_addresses(self) -> tuple[str, ...]:
        """Address of each executor that serves, but those that names mean."""
        return tuple(one for one in self.executor.split(",") if not one.startswith(_NAME))

    @property
    def executor_names(self) -> tuple[str, ...]:
        """Names that mean any number of executors, as dns:///NAME:PORT."""
        return tuple(one for one in self.executor.split(",") if one.startswith(_NAME))

    @property
    def standby_addresses(self) -> tuple[str, ...]:
        """Addresses of executors that step in, preferred ones first."""
        return tuple(self.standby.split(",")) if self.standby else ()

    @property
    def link_addresses(self) -> tuple[str, ...]:
        """Every address to which a step link may go."""
        return (*self.executor.split(","), *self.standby_addresses)

    def listen_addresses(self) -> dict[str, str]:
        """Return the addresses to listen on, by setting name, without those set to none."""
        names = ("listen", "admin_listen", "metrics_listen", "local_listen")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


PROGRAM = Program(
    schema=SchedulerSettings,
    command="python -m scheduler_svc",
    description="Tandem's scheduler service: serves clients, plans steps, drives one executor. "
    "Engine limits that are not set follow the executor.",
    exit_codes="0 stopped, 1 failed, 2 wrong configuration",
    env_prefix="TANDEM_",
    foreign_prefixes=("TANDEM_EXECUTOR_", "TANDEM_CLIENT_", "TANDEM_CACHE_", "TANDEM_TORCH_"),
    foreign_variables=frozenset({"TANDEM_ADDRESS", "TANDEM_ADMIN_ADDRESS", "TANDEM_API_KEY"}),
    other="executor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings(Loaded[SchedulerSettings]):
    """Settings with the source of each, and their values on a given executor."""

    def limits_on(self, geometry: ExecutorGeometry) -> EngineConfig:
        """
        Join the engine limits with an executor's: the smaller of both applies.

        Raises:
            IncompatibleExecutor: A limit set here cannot hold on this executor.
        """
        settings = self.settings
        for name, ours, theirs in (
            ("block_size", settings.block_size, geometry.block_size),
            ("max_num_blocks", settings.max_num_blocks, geometry.num_blocks),
            ("max_model_len", settings.max_model_len, geometry.max_model_len),
        ):
            if ours is None or not self.is_set(name):
                continue
            if not (ours == theirs if name == "block_size" else ours <= theirs):
                raise IncompatibleExecutor(
                    f"{name} is set to {ours} ({self.sources[name]}), but the executor has "
                    f"{theirs}: change one of them"
                )
        total_tokens = self._smaller("max_total_tokens", geometry.max_total_tokens)
        limits = EngineConfig(
            block_size=geometry.block_size,
            max_num_blocks=self._smaller("max_num_blocks", geometry.num_blocks),
            max_batch_size=min(
                self._smaller("max_batch_size", geometry.max_batch_size), total_tokens
            ),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=self._smaller("max_model_len", geometry.max_model_len),
            max_total_tokens=total_tokens,
            memory_threshold=settings.memory_threshold,
        )
        try:
            limits.validate()
        except InvalidConfig as error:
            raise IncompatibleExecutor(f"on this executor {error.message}") from error
        return limits

    def in_force(self, limits: EngineConfig | None) -> ConfigSnapshot:
        """Return every setting; `limits`, if given, replace the engine limits (see `limits_on`)."""
        joined = {} if limits is None else limits.as_dict()
        return ConfigSnapshot(
            entries=tuple(
                ConfigEntry(
                    name=name,
                    json_value=json.dumps(joined.get(name, value)),
                    source=self._source(name, value, joined.get(name, value)),
                )
                for name, value in self.settings.model_dump(mode="json").items()
            )
        )

    def _smaller(self, name: str, theirs: int) -> int:
        ours: int | None = getattr(self.settings, name)
        return theirs if ours is None or name not in self.sources else min(ours, theirs)

    def _source(self, name: str, ours: object, in_force: object) -> str:
        return "executor" if ours != in_force else self.sources.get(name, "default")


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedSettings:
    """
    Read and validate all settings.

    Raises:
        InvalidConfig: A setting is wrong; the error names the first one and its source.
        SystemExit: After --help.
    """
    read = read_settings(PROGRAM, argv, environ)
    _check_scheduling(read)
    _check_standby(read)
    _ = read.settings.executor_tls
    return LoadedSettings(settings=read.settings, sources=read.sources, places=read.places)


def _check_standby(read: Loaded[SchedulerSettings]) -> None:
    settings = read.settings
    both = sorted(set(settings.executor_addresses) & set(settings.standby_addresses))
    if both:
        place = read.places.get("standby", "standby")
        raise InvalidConfig(
            f"standby names {both[0]}, which executor names too ({place}): an executor serves or "
            "stands by",
            field="standby",
        )


def _check_scheduling(read: Loaded[SchedulerSettings]) -> None:
    try:
        read.settings.core_options()
    except InvalidConfig as error:
        place = read.places.get(error.field or "")
        if place is None:
            raise
        raise InvalidConfig(f"{error.message} ({place})", field=error.field) from error
