"""All values of a simulation, each under one flat name, and their conversion from text."""

from __future__ import annotations

import enum
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from scheduler_svc.core.request.options import CoreOptions
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig
from tandem.link import MAX_STAGES
from tandem_simulator.executor.setup import MEASURED, Outage, Setup
from tandem_simulator.executor.step_time import StepTime
from tandem_simulator.presets import MACHINES
from tandem_simulator.workload.ask import Requests
from tandem_simulator.workload.distributions import Arrivals, Lengths
from tandem_simulator.workload.synthetic import PRESETS, Synthetic, Workload
from tandem_simulator.workload.trace import read_trace

Section = TypeVar("Section", Workload, EngineConfig, CoreOptions, StepTime)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """
    Values that belong to no other group.

    Attributes:
        machine: Preset of the modelled executor and its limits.
        workload: Preset of the requests.
        trace: File of JSON lines to take the requests from instead.
        seed: Of everything that is drawn.
        core_us: Virtual microseconds that each plan and each result costs the scheduler; measured
            for the time they really take here, which makes runs differ.
        num_host_blocks: KV blocks in host memory, for swapping; default: as the machine.
        executors: How many executors compute the requests, 1 to 64; each is one such machine.
        executor_blocks: KV blocks of each executor, as N:N:..., over again where there are more
            executors; default: max_num_blocks for all.
        pp: Pipeline stages of each executor, 1 to 64; each has its share of the layers, so that the
            machine's memory and limits are those of all stages together.
        all_rows: Plan all decodes in each step, as for one stage, instead of lanes that take turns.
        kill_executor_at: Virtual time at which one executor is lost, with all that it computes.
        kill_executor: The executor that is lost, counted from 0.
        executor_back_s: Seconds until there is an empty executor in its place.
        slo_ttft_s: A request counts for goodput when its first token came within this
        slo_tpot_s: and its mean time per further token was at most this.
        check: Prove every token, every KV position and the core's state while running.
    """

    machine: str = "h100-8b"
    workload: str = "plain"
    trace: str | None = None
    seed: int = 0
    core_us: str = "0"
    num_host_blocks: int | None = None
    executors: int = 1
    executor_blocks: str | None = None
    pp: int = 1
    all_rows: bool = False
    kill_executor_at: float | None = None
    kill_executor: int = 0
    executor_back_s: float = 5.0
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1
    check: bool = False


SECTIONS: dict[str, type[Any]] = {
    "run": Run,
    "workload": Workload,
    "executor's step time": StepTime,
    "limits": EngineConfig,
    "core options": CoreOptions,
}
"""Groups of names; each is a dataclass, and its docstring has the help text of every field."""

ALIASES = {"dp_size": "executors", "pp_size": "pp"}
"""Names that mean another one."""
MAX_EXECUTORS = 64

_HIDDEN = {"track_request_events", "track_token_events", "track_paused_events"}
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One name: its group, its help text, and the conversion of a text to a value."""

    name: str
    section: str
    about: str
    choices: tuple[str, ...]
    is_flag: bool
    parse: Callable[[str], Any]


def known_names() -> dict[str, Name]:
    """Return every name, with underscores, in the order of the groups and their fields."""
    names: dict[str, Name] = {}
    for section, cls in SECTIONS.items():
        hints, about = typing.get_type_hints(cls), attribute_docs(cls)
        for field in fields(cls):
            if field.name in _HIDDEN:
                continue
            kind = hints[field.name]
            choices = _choices(field.name, kind)
            names[field.name] = Name(
                name=field.name,
                section=section,
                about=about[field.name],
                choices=choices,
                is_flag=kind is bool,
                parse=_parser(field.name, kind, choices),
            )
    return names


def attribute_docs(cls: type[Any]) -> dict[str, str]:
    """Return the text on each attribute from a dataclass's docstring."""
    # From Python 3.13 on the compiler takes the indentation off, up to 3.12 it is there.
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(about.split()) for name, about in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A simulation that is ready to run, and the values it came from."""

    setup: Setup
    requests: Requests
    slo_ttft_s: float
    slo_tpot_s: float
    settings: dict[str, Any]


def build(texts: Mapping[str, str]) -> Experiment:
    """
    Make an experiment from texts by name; the presets give all values that are not named.

    Raises:
        InvalidConfig: A name is unknown, or its text is not a valid value.
    """
    names = known_names()
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, text in texts.items():
        if name not in names:
            raise InvalidConfig(f"unknown name {name!r}: see --help for all of them")
        values[names[name].section][name] = names[name].parse(text)
    run = Run(**values["run"])
    machine = MACHINES[run.machine]
    workload = _replaced(PRESETS[run.workload], values["workload"])
    limits = _replaced(machine.limits, values["limits"])
    options = _replaced(CoreOptions(), values["core options"])
    step_time = _replaced(machine.step_time, values["executor's step time"])
    num_host_blocks = run.num_host_blocks
    _check_run(run)
    setup = Setup(
        limits=limits,
        options=options,
        step_time=step_time,
        num_host_blocks=machine.num_host_blocks if num_host_blocks is None else num_host_blocks,
        num_executors=run.executors,
        executor_blocks=_executor_blocks(run.executor_blocks),
        num_stages=run.pp,
        has_lanes=not run.all_rows,
        outage=_outage(run),
        core_s=_core_s(run.core_us),
        is_checked=run.check,
    )
    for number in range(run.executors):
        setup.limits_of(number).validate()
    requests: Requests
    if run.trace is not None:
        if values["workload"] or "workload" in values["run"]:
            raise InvalidConfig("trace: a trace takes the place of a workload, leave out the other")
        requests = read_trace(Path(run.trace), run.seed)
    else:
        requests = Synthetic(workload, run.seed, limits.max_model_len)
    sections = [run, step_time, limits, options, *([] if run.trace else [workload])]
    return Experiment(
        setup=setup,
        requests=requests,
        slo_ttft_s=run.slo_ttft_s,
        slo_tpot_s=run.slo_tpot_s,
        settings=_printable(sections),
    )


def _core_s(text: str) -> float:
    if text == "measured":
        return MEASURED
    core_us = _number("core_us", text)
    if not 0 <= core_us < math.inf:
        message = f"core_us is {core_us}: it must be 0 or more, or measured"
        raise InvalidConfig(message, field="core_us")
    return core_us / 1e6


def _executor_blocks(text: str | None) -> tuple[int, ...]:
    return tuple(_whole("executor_blocks", one) for one in text.split(":")) if text else ()


def _outage(run: Run) -> Outage | None:
    if run.kill_executor_at is None:
        return None
    return Outage(
        executor=run.kill_executor,
        at_s=run.kill_executor_at,
        back_after_s=run.executor_back_s,
    )


def _check_run(run: Run) -> None:
    least = {"seed": 0, "num_host_blocks": 0, "kill_executor_at": 0, "executor_back_s": 0}
    for name, bound in least.items():
        value = getattr(run, name)
        if value is not None and not bound <= value < math.inf:
            raise InvalidConfig(f"{name} is {value}: it must be {bound} or more", field=name)
    if not 1 <= run.executors <= MAX_EXECUTORS:
        message = f"executors is {run.executors}: it must be from 1 to {MAX_EXECUTORS}"
        raise InvalidConfig(message, field="executors")
    if not 1 <= run.pp <= MAX_STAGES:
        message = f"pp is {run.pp}: it must be from 1 to {MAX_STAGES}"
        raise InvalidConfig(message, field="pp")
    if not 0 <= run.kill_executor < run.executors:
        message = f"kill_executor is {run.kill_executor}: there are {run.executors}, counted from 0"
        raise InvalidConfig(message, field="kill_executor")


def _replaced(base: Section, values: dict[str, Any]) -> Section:
    changed = replace(base, **values)
    if not isinstance(changed, StepTime):
        changed.validate()
    return changed


def _printable(sections: list[Any]) -> dict[str, Any]:
    return {
        field.name: value if _is_plain(value) else str(value)
        for section in sections
        for field in fields(section)
        if field.name not in _HIDDEN
        for value in [getattr(section, field.name)]
    }


def _is_plain(value: Any) -> bool:
    """Return True for a value that JSON can hold as it is: None, a number or a boolean."""
    return (
        value is None
        or isinstance(value, int)
        or (isinstance(value, float) and math.isfinite(value))
    )


def _choices(name: str, kind: Any) -> tuple[str, ...]:
    if name == "machine":
        return tuple(MACHINES)
    if name == "workload":
        return tuple(PRESETS)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return tuple(kind)
    return ()


def _parser(name: str, kind: Any, choices: tuple[str, ...]) -> Callable[[str], Any]:
    is_optional = typing.get_origin(kind) in {typing.Union, types.UnionType}
    if is_optional:
        kind = next(one for one in typing.get_args(kind) if one is not type(None))

    def parse(text: str) -> Any:
        if is_optional and text == "none":
            return None
        if choices and text not in choices:
            message = f"{name} is {text!r}: it must be one of {', '.join(choices)}"
            raise InvalidConfig(message, field=name)
        reader = _READERS.get(kind)
        return kind(text) if reader is None else reader(name, text)

    return parse


def _truth(name: str, text: str) -> bool:
    if text not in _TRUTHS:
        raise InvalidConfig(f"{name} is {text!r}: it must be true or false", field=name)
    return _TRUTHS[text]


def _lengths(name: str, text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except InvalidConfig as error:
        raise InvalidConfig(f"{name}: {error.message}", field=name) from None


def _arrivals(name: str, text: str) -> Arrivals:
    try:
        return Arrivals.parse(text)
    except InvalidConfig as error:
        raise InvalidConfig(f"{name}: {error.message}", field=name) from None


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = f"{name} is {text!r}: it must be a whole number"
        raise InvalidConfig(message, field=name) from None


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidConfig(f"{name} is {text!r}: it must be a number", field=name) from None
    if math.isnan(value):
        raise InvalidConfig(f"{name} is {text!r}: it must be a number", field=name)
    return value


_READERS: dict[Any, Callable[[str, str], Any]] = {
    bool: _truth,
    int: _whole,
    float: _number,
    Lengths: _lengths,
    Arrivals: _arrivals,
}
