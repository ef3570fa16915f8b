"""
The executor's settings: one schema for flags, files and environment (`tandem.settings` reads them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from executor_svc.config.graph_sizes import GraphCount, check_graph_count
from executor_svc.model.files.directory import find_model
from tandem.engine_config import MAX_THREADS, EngineConfig
from tandem.link import MAX_STAGES
from tandem.network.link_security import check_listener
from tandem.network.tls_files import ServerTls, server_tls
from tandem.settings.options import Group
from tandem.settings.program import Program
from tandem.settings.reader import read_settings
from tandem.settings.schema import (
    INSECURE_LINK,
    Address,
    Alias,
    BlockSize,
    BufferSizeGb,
    GpuMemoryUtilization,
    LinkTokenFile,
    Loaded,
    LogSettings,
    MaxBatchSize,
    MaxModelLen,
    MaxTotalTokens,
    MemFractionStatic,
    Metavar,
    OptionGroup,
    ServiceSettings,
    SwapSpaceGb,
)

_DEFAULTS = EngineConfig()

_GraphCount = Annotated[
    GraphCount,
    BeforeValidator(lambda value: "none" if value is None else value),  # as in Megatron Core
    Metavar("{default,none,-1,N}"),
]


TpSize = Annotated[int, Alias("tensor_parallel_size"), Alias("tensor_model_parallel_size")]
PpSize = Annotated[int, Alias("pipeline_parallel_size"), Alias("pipeline_model_parallel_size")]
# vLLM, Megatron Core


class _ModelSettings(OptionGroup):
    """The model and the device that computes it."""

    group: ClassVar[Group] = Group.MODEL

    model: Annotated[Path, Metavar("DIR")] = Field(
        description="model directory in Hugging Face format: config.json, *.safetensors, "
        "tokenizer.json; or ORG/NAME of a model that is in the Hugging Face cache"
    )
    model_name: str | None = Field(
        None, min_length=1, description="name clients see; default: the directory's name"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type of weights and KV; auto: on a GPU the model's own, on a CPU the fastest",
    )
    tp_size: TpSize = Field(
        1,
        ge=1,
        description="processes that share the model and compute each step together, its ranks; one "
        "GPU each",
    )
    pp_size: PpSize = Field(
        1,
        ge=1,
        le=MAX_STAGES,
        description="stages of the model, each with some of its layers and with tp_size processes; "
        "a stage computes while the next one computes the step before",
    )
    device: str = Field("auto", description="device to compute on: auto, cpu, cuda or cuda:N")


class _EngineLimits(OptionGroup):
    """Engine limits, which are settings of both services; the hidden two are the scheduler's."""

    group: ClassVar[Group] = Group.LIMITS

    block_size: BlockSize = Field(_DEFAULTS.block_size, description="tokens per KV block")
    max_num_blocks: int | None = Field(
        None,
        description="KV blocks to allocate; default: on a GPU what gpu_memory_utilization 0.9 "
        "leaves, on a CPU a quarter of the free memory, at most what max_batch_size requests of "
        "max_model_len tokens need",
    )
    max_batch_size: MaxBatchSize = Field(
        _DEFAULTS.max_batch_size, description="most sequences in one step"
    )
    max_model_len: MaxModelLen = Field(
        None,
        description="most tokens of prompt plus output; default: what the model supports and the "
        "KV memory holds",
    )
    max_total_tokens: MaxTotalTokens = Field(
        _DEFAULTS.max_total_tokens,
        description="most tokens computed in one step; unset, fewer on a CPU that computes a large "
        "model",
    )
    max_num_seqs: int = Field(_DEFAULTS.max_num_seqs, exclude=True)
    memory_threshold: float = Field(_DEFAULTS.memory_threshold, exclude=True)


class _KvMemorySettings(OptionGroup):
    """Other ways to size the KV memory, and host memory for it."""

    group: ClassVar[Group] = Group.KV_MEMORY

    buffer_size_gb: BufferSizeGb = Field(None, description="GiB of KV memory; sizes it")
    mem_fraction_static: MemFractionStatic = Field(
        None,
        description="share of the device's memory for weights and KV together; sizes the KV memory",
    )
    gpu_memory_utilization: GpuMemoryUtilization = Field(
        None,
        description="share of the device's memory for weights, activations (measured at start) "
        "and KV together; sizes the KV memory",
    )
    swap_space_gb: SwapSpaceGb = Field(
        0.0,
        description="GiB of host memory for the KV of preempted requests; 0: compute it again",
    )


class _ComputingSettings(OptionGroup):
    """Settings of the computation; the scheduler ignores them in a file for both services."""

    group: ClassVar[Group] = Group.COMPUTING

    batch_invariant: bool = Field(
        False,
        description="give a request the same tokens, bit for bit, whatever is computed beside it, "
        "however its prompt is cut, and with tp_size 1, 2 or 4; slower",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="CPU threads of one operation, in each rank; default: one per physical core "
        "this process may run on (taskset, cpuset), within the CPU quota and OMP_NUM_THREADS, "
        "divided among the ranks on this machine",
    )
    cpu_extension: Literal["auto", "on", "off"] = Field(
        "auto",
        description="attention on the CPU by a C++ library, compiled at the first start and kept "
        "in TANDEM_CACHE_DIR, default ~/.cache/tandem; auto: where that works",
    )
    num_cuda_graphs: _GraphCount = Field(
        "default",
        description="decode steps to capture on a GPU, by number of rows: default (up to 30 sizes "
        "for up to 512 rows), none, -1 (1, 2, 4, every 8th, from 256 on every 16th) or N, evenly "
        "spaced; larger steps run eagerly",
    )
    cuda_graph_mixed_prefill_count: int | None = Field(
        16,
        ge=0,
        description="prefills that each captured step of prompts and decodes together has room "
        "for; 0 captures decodes alone",
    )
    use_cuda_graphs_for_non_decode_steps: bool = Field(
        True,
        description="capture steps with prompts as well, of as few tokens as decode steps have "
        "rows; rows that ask for penalties or log probabilities keep their step eager",
    )


class _LinkSecurity(OptionGroup):
    """Encryption of calls, and proof that they come from a scheduler of ours."""

    group: ClassVar[Group] = Group.SECURITY

    tls_cert: Path | None = Field(
        None,
        description="certificate to listen with, in PEM format, with intermediate ones; a changed "
        "file is used by the next connection",
    )
    tls_key: Path | None = Field(None, description="private key of the certificate, in PEM format")
    tls_client_ca: Path | None = Field(
        None,
        description="certificates that sign clients' certificates; a client without one cannot "
        "connect",
    )
    link_token_file: LinkTokenFile = Field(
        None,
        description="file of tokens, one a line, of which a scheduler must send one; health needs "
        "none",
    )
    insecure_link: bool = Field(False, description=INSECURE_LINK)

    @property
    def tls(self) -> ServerTls | None:
        """The files to listen with; None for plain text."""
        return server_tls(self.tls_cert, self.tls_key, self.tls_client_ca)


class ExecutorSettings(
    _ComputingSettings,
    _KvMemorySettings,
    _EngineLimits,
    _ModelSettings,
    _LinkSecurity,
    LogSettings,
    ServiceSettings,
):
    """Settings of one executor service; validated where they are read."""

    group: ClassVar[Group] = Group.SERVICE

    listen: Address = Field(
        "127.0.0.1:50061", description="gRPC address for the scheduler; port 0 takes a free one"
    )
    static_kv_memory_pointers: bool = Field(
        False,
        description="keep the KV memory's addresses while it is given back (suspend), so that "
        "captured steps stay and need not be captured again; needs Linux or a CUDA driver",
    )
    collect_margins: bool = Field(
        False, description="report by how much each token won, for equality tests; slower"
    )
    dry_run: bool = Field(
        False, description="print what would take how much memory, and exit; loads no weights"
    )
    stop_grace_s: float = Field(
        20.0,
        ge=0,
        description="seconds that the running step may go on after SIGTERM; exit code 1 if it does "
        "not end",
    )
    ready_file: Path | None = Field(
        None, description="file to write address and pid to, as JSON, once the port listens"
    )


PROGRAM = Program(
    schema=ExecutorSettings,
    command="python -m executor_svc",
    description="Tandem's executor service: computes the steps that a scheduler plans.",
    exit_codes="0 stopped, 1 failed, 2 wrong configuration or model",
    env_prefix="TANDEM_EXECUTOR_",
    foreign_variables=frozenset(
        {"TANDEM_EXECUTOR_CA", "TANDEM_EXECUTOR_CERT", "TANDEM_EXECUTOR_KEY"}
    ),
    other="scheduler",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings(Loaded[ExecutorSettings]):
    """Settings, the source of each, and the engine limits they imply."""

    @property
    def limits(self) -> EngineConfig:
        """The engine limits as set; the scheduler's two of a shared file are among them."""
        return self.settings.engine_config()

    @property
    def model_name(self) -> str:
        """The name clients see."""
        return self.settings.model_name or self.settings.model.resolve().name

    def check_link(self) -> None:
        """
        Check that a link that leaves this machine is protected.

        Raises:
            InvalidConfig: It is not, and `insecure_link` does not allow that.
        """
        settings = self.settings
        check_listener(
            settings.listen,
            is_authenticated=settings.link_token_file is not None
            or settings.tls_client_ca is not None,
            insecure_link=settings.insecure_link,
        )


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedSettings:
    """
    Read and validate all settings.

    Raises:
        InvalidConfig: A setting is wrong; names the first such setting and where it was set.
        SystemExit: After --help.
    """
    read = read_settings(PROGRAM, argv, environ)
    settings = read.settings
    check_graph_count(settings.num_cuda_graphs)
    _ = settings.tls
    model = find_model(settings.model, environ)
    if model != settings.model:  # the model's name is not that of a snapshot's directory
        name = settings.model_name or str(settings.model)
        settings = settings.model_copy(update={"model": model, "model_name": name})
    return LoadedSettings(settings=settings, sources=read.sources, places=read.places)
