"""
The executor's settings and where they come from, in rising order: defaults, the --config file of
engine limits, environment (`TANDEM_EXECUTOR_...`), flags.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig

ENV_PREFIX = "TANDEM_EXECUTOR_"
LIMITS = ("block_size", "max_num_blocks", "max_batch_size", "max_model_len", "max_total_tokens")
"""Engine limits that an executor obeys; the file holds the scheduler's two as well."""

_ALIASES = {"max_num_batched_tokens": "max_total_tokens"}
_SET_BY_KUBERNETES = re.compile(
    ENV_PREFIX + r"(SERVICE_(HOST|PORT.*)|PORT(_\d+_(TCP|UDP).*)?|(\w+_)?SERVICE_(HOST|PORT.*))"
)
"""Injected into every pod next to a Service named tandem-executor."""


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    is_tcp = bool(host and colon) and port.isdecimal() and int(port) < 65_536
    if not is_tcp and not text.startswith("unix:"):
        raise ValueError("must be HOST:PORT or unix:PATH")
    return text


_DEFAULTS = EngineConfig()


class ExecutorSettings(BaseModel):
    """Settings of one executor service; every one is a flag and an environment variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = Field(
        description="model directory in Hugging Face format: config.json, *.safetensors, "
        "tokenizer.json"
    )
    model_name: str | None = Field(
        None, min_length=1, description="name clients see; default: the directory's name"
    )
    listen: Annotated[str, AfterValidator(_address)] = Field(
        "127.0.0.1:50061", description="gRPC address for the scheduler; port 0 takes a free one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of weights and KV; auto: the model's own where it is fast"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of one operation; default: PyTorch's choice, within the CPU quota",
    )
    block_size: int = Field(_DEFAULTS.block_size, description="tokens per KV block")
    max_num_blocks: int = Field(_DEFAULTS.max_num_blocks, description="KV blocks to allocate")
    max_batch_size: int = Field(_DEFAULTS.max_batch_size, description="most sequences in one step")
    max_model_len: int = Field(
        _DEFAULTS.max_model_len,
        description="most tokens of prompt plus output; default: at most what the model supports",
    )
    max_total_tokens: int = Field(
        _DEFAULTS.max_total_tokens,
        description="most tokens computed in one step (alias: --max-num-batched-tokens)",
    )
    collect_margins: bool = Field(
        False, description="report by how much each token won, for equality tests; slower"
    )
    ready_file: Path | None = Field(
        None, description="file to write address and pid to, as JSON, once the port listens"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log event to print"
    )
    log_format: Literal["json", "console"] = Field(
        "console", description="one JSON object per line, or text for people; to stderr"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """
    Settings with the engine limits they imply.

    `sources` says of every setting that was set where: a file's path, an environment variable or a
    flag. One that is missing has its default.
    """

    settings: ExecutorSettings
    limits: EngineConfig
    sources: dict[str, str]

    @property
    def model_name(self) -> str:
        """The name clients see."""
        return self.settings.model_name or self.settings.model.resolve().name


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> LoadedSettings:
    """
    Read and validate all settings.

    Raises:
        InvalidConfig: The first thing wrong, naming the setting and where it was set.
        SystemExit: After --help.
    """
    flags = vars(_parser().parse_args(argv))
    config_file = flags.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG")
    base, sources = _read_file(Path(config_file)) if config_file else (_DEFAULTS, {})
    values: dict[str, Any] = {name: getattr(base, name) for name in LIMITS}
    texts = [*_from_environment(environ), *((_flag(name), name, flags[name]) for name in flags)]
    for written, name, text in texts:
        values[name] = _converted(name, text, written)
        sources[name] = written
    if "model" not in values:
        raise InvalidConfig(f"no model: give --model DIR or set {ENV_PREFIX}MODEL")
    settings = ExecutorSettings(**values)
    limits = EngineConfig(
        **{name: getattr(settings, name) for name in LIMITS},
        max_num_seqs=base.max_num_seqs,
        memory_threshold=base.memory_threshold,
    )
    limits.validate()
    return LoadedSettings(settings=settings, limits=limits, sources=sources)


def _read_file(path: Path) -> tuple[EngineConfig, dict[str, str]]:
    config = EngineConfig.from_file(path)
    return config, dict.fromkeys(json.loads(path.read_text()), str(path))


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    found = []
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == f"{ENV_PREFIX}CONFIG":
            continue
        if _SET_BY_KUBERNETES.fullmatch(variable):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        name = _ALIASES.get(name, name)
        if name not in ExecutorSettings.model_fields:
            raise InvalidConfig(f"environment variable {variable} is unknown{_suggestion(name)}")
        found.append((variable, name, text))
    return found


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, ExecutorSettings.model_fields, n=1)
    return f"; did you mean {ENV_PREFIX}{close[0].upper()}?" if close else "; see --help"


def _converted(name: str, text: str, written: str) -> Any:
    field = ExecutorSettings.model_fields[name]
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    try:
        return TypeAdapter(kind).validate_strings(text)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidConfig(f"{written}: {why[0].lower()}{why[1:]}, got {text!r}") from error


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as every other source does."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(f"{message}; see --help")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m executor_svc",
        description="Tandem's executor service: computes the steps that a scheduler plans.",
        epilog="Sources in rising order: defaults, --config file, environment (TANDEM_EXECUTOR_ "
        "and the flag's name in capitals, for example TANDEM_EXECUTOR_BLOCK_SIZE), flags. "
        "Exit codes: 0 stopped, 1 failed, 2 wrong configuration or model.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="JSON object of engine limits, shared with the scheduler"
    )
    for name, field in ExecutorSettings.model_fields.items():
        spellings = [_flag(name), *(_flag(a) for a, known in _ALIASES.items() if known == name)]
        if field.annotation is bool:
            parser.add_argument(
                *spellings, dest=name, action="store_const", const="true", help=_help(field)
            )
        else:
            parser.add_argument(
                *spellings, dest=name, metavar=_metavar(name, field), help=_help(field)
            )
    return parser


def _metavar(name: str, field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return "{" + ",".join(choices) + "}"
    if field.annotation is int or int in choices:
        return "N"
    return {"model": "DIR", "listen": "HOST:PORT", "ready_file": "FILE"}.get(name, "NAME")


def _help(field: FieldInfo) -> str:
    has_default = not field.is_required() and field.default is not None
    default = f" (default: {field.default})" if has_default else ""
    return f"{field.description}{default}".replace("%", "%%")
