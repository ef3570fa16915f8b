"""Schema that the settings of both services share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tandem.engine_config import MAX_GIB, EngineConfig
from tandem.network.address import (
    check_listen_address,
    check_targets,
    check_tcp_address,
    check_unix_address,
)
from tandem.settings.options import Group
from tandem.settings.presets import PresetName

LIMITS = tuple(EngineConfig().as_dict())
"""Names of the engine limits, in the order of the documentation."""

KV_SIZE_KNOBS = (
    "max_num_blocks",
    "buffer_size_gb",
    "mem_fraction_static",
    "gpu_memory_utilization",
)
"""Settings that size the KV memory; at most one of them may be set."""

PRESET = "preset"
"""Name of the source of settings that a preset set."""


@dataclass(frozen=True, slots=True)
class Metavar:
    """Annotation of a field's type: the placeholder that --help shows for its value."""

    text: str


@dataclass(frozen=True, slots=True)
class Alias:
    """Annotation of a field's type: another accepted name of the option, in every source."""

    name: str


Address = Annotated[str, AfterValidator(check_listen_address), Metavar("HOST:PORT")]
"""Address on which a service listens: HOST:PORT or unix:PATH."""
TcpAddress = Annotated[str, AfterValidator(check_tcp_address), Metavar("HOST:PORT")]
"""Address on which a service listens that does not support unix sockets."""
SocketAddress = Annotated[str, AfterValidator(check_unix_address), Metavar("unix:PATH")]
"""Address on which a service listens that only processes of this machine may reach."""
Addresses = Annotated[str, AfterValidator(check_targets), Metavar("HOST:PORT[,HOST:PORT...]")]
"""Addresses to connect to, one or several, none twice; spaces around them are removed."""
# Engine limits that have other names elsewhere.
BlockSize = Annotated[int, Alias("block_size_tokens")]  # Megatron Core
MaxBatchSize = Annotated[
    int, Alias("max_running_requests"), Alias("max_requests")
]  # SGLang, Megatron Core
MaxModelLen = Annotated[int | None, Alias("max_sequence_length")]  # Megatron Core
MaxTotalTokens = Annotated[int, Alias("max_num_batched_tokens")]  # vLLM
# Sizes of memory, which a file for both services may have.
BufferSizeGb = Annotated[float | None, Gt(0), Le(MAX_GIB)]
MemFractionStatic = Annotated[float | None, Gt(0), Lt(1)]
GpuMemoryUtilization = Annotated[float | None, Gt(0), Le(1)]
SwapSpaceGb = Annotated[float, Ge(0), Le(MAX_GIB)]
LinkTokenFile = Path | None
"""File of the token that scheduler and executor share; both have the setting."""
INSECURE_LINK = (
    "let the step link leave this machine without client certificates or a token; for networks "
    "where every machine is trusted"
)
"""Text of the switch `insecure_link`, which both have too."""
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]


class OptionGroup(BaseModel):
    """
    Fields that are options of one group; each is a flag, an environment variable and a key of a
    file. A service's settings are its groups put together.

    A field with `exclude=True` is only a key of a file and is not shown: it is a setting of the
    other service, and one file serves both.

    Attributes:
        group: Group of the options that the class itself declares.
    """

    group: ClassVar[Group] = Group.SERVICE
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServiceSettings(OptionGroup):
    """Settings of one service, with the seven engine limits and all of `KV_SIZE_KNOBS`."""

    group: ClassVar[Group] = Group.LIMITS

    preset: PresetName | None = Field(
        None, description="named starting point; whatever is set elsewhere wins over it"
    )
    # Only the executor uses these and describes them; a file that serves both may have them.
    buffer_size_gb: BufferSizeGb = Field(None, exclude=True)
    mem_fraction_static: MemFractionStatic = Field(None, exclude=True)
    gpu_memory_utilization: GpuMemoryUtilization = Field(None, exclude=True)
    swap_space_gb: SwapSpaceGb = Field(0.0, exclude=True)

    def engine_config(self) -> EngineConfig:
        """
        Return the engine limits as set here. A limit that is left to the model (max_model_len) or
        to the memory (max_num_blocks) has its documented default here; max_model_len is at least
        block_size, as the rules demand.
        """
        given = {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}
        limits = EngineConfig(**given)
        if "max_model_len" in given:
            return limits
        return replace(limits, max_model_len=max(limits.max_model_len, limits.block_size))


class LogSettings(OptionGroup):
    """Settings of a service's log."""

    log_level: LogLevel = Field("info", description="least severe log event to print")
    log_format: LogFormat = Field(
        "console", description="logs as one JSON object per line, or as text for people"
    )


S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[S]):
    """
    Settings with the source of each; a setting that no source set is in neither dictionary.

    Attributes:
        settings: All settings.
        sources: Source by name: "preset", "file", "environment" or "flag".
        places: Place by name, for texts: the preset, the flag, the variable, or file and key.
    """

    settings: S
    sources: dict[str, str]
    places: dict[str, str] = field(default_factory=dict)

    def is_set(self, name: str) -> bool:
        """Return True if a file, variable or flag set it; a preset's value counts as a default."""
        return self.sources.get(name, PRESET) != PRESET

    @property
    def kv_size_knob(self) -> str | None:
        """The one of `KV_SIZE_KNOBS` that sizes the KV memory; None if the device's memory does."""
        for knob in KV_SIZE_KNOBS:
            if knob in self.sources and getattr(self.settings, knob) is not None:
                return knob
        return None

    def shown(self) -> list[dict[str, Any]]:
        """Return name, JSON value and source of every setting; a default's source is "default"."""
        return [
            {"name": name, "value": value, "source": self.sources.get(name, "default")}
            for name, value in self.settings.model_dump(mode="json").items()
        ]
