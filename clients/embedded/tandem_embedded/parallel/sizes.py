"""Sizes of an engine's parallelism, under the names that vLLM, SGLang and Megatron use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

from tandem.errors import InvalidConfig
from tandem.wording import nearest


class SizeAliases(TypedDict, total=False):
    """Other names of the sizes, for programs that are written for another engine."""

    dp_size: int
    tensor_parallel_size: int
    tp_size: int
    pipeline_parallel_size: int
    pp_size: int


_DATA, _TENSOR = "data_parallel_size", "tensor_model_parallel_size"
_PIPELINE = "pipeline_model_parallel_size"
_NAMES = {_DATA: "data", _TENSOR: "tensor", _PIPELINE: "pipeline"}
_MEANS = {
    "dp_size": _DATA,
    "tensor_parallel_size": _TENSOR,
    "tp_size": _TENSOR,
    "pipeline_parallel_size": _PIPELINE,
    "pp_size": _PIPELINE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """
    Sizes as given; None leaves one to devices, backends or process groups, and is 1 without them.

    Attributes:
        data: Runners in this process, each with all of the model.
        tensor: Processes that hold a share of every layer each.
        pipeline: Processes that hold some of the layers each.
    """

    data: int | None = None
    tensor: int | None = None
    pipeline: int | None = None

    @property
    def num_runners(self) -> int:
        """Number of runners in this process."""
        return self.data or 1

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model, where no groups say otherwise."""
        return (self.tensor or 1) * (self.pipeline or 1)

    @property
    def ranks_text(self) -> str:
        """Words for the sizes that processes share the model by."""
        if self.pipeline in (None, 1):
            return f"{_TENSOR} is {self.tensor}"
        if self.tensor in (None, 1):
            return f"{_PIPELINE} is {self.pipeline}"
        return f"{_TENSOR} x {_PIPELINE} is {self.tensor} x {self.pipeline} = {self.num_ranks}"

    @property
    def ranks_field(self) -> str:
        """Name of the size by which the number of processes is most likely wrong."""
        return _TENSOR if self.pipeline in (None, 1) else _PIPELINE

    def with_runners(self, count: int, what: str) -> ParallelSizes:
        """
        Return the sizes with as many runners as there are devices or backends.

        Raises:
            InvalidConfig: Another number is given.
        """
        if self.data not in (None, count):
            message = f"{_DATA} is {self.data}, but {count} {what} are given: give as many"
            raise InvalidConfig(message, field=_DATA)
        return replace(self, data=count)


def parallel_sizes(
    given: Iterable[int | None], aliases: Mapping[str, object], engine: Callable[..., object]
) -> ParallelSizes:
    """
    Return the sizes that a caller gave by their names or aliases.

    Args:
        given: Sizes by name: of data, tensor and pipeline parallelism.
        aliases: All other keyword arguments of the caller.
        engine: What was called, whose other arguments may have been meant.

    Raises:
        InvalidConfig: A size is out of range or given twice, or sizes exclude each other.
        TypeError: A keyword argument is unknown.
    """
    named = zip(_NAMES, given, strict=True)
    values: dict[str, object] = {name: one for name, one in named if one is not None}
    for alias, value in aliases.items():
        name = _MEANS.get(alias)
        if name is None:
            meant = nearest(alias, [*inspect.signature(engine).parameters, *_MEANS])
            hint = f". Did you mean {meant!r}?" if meant else ""
            raise TypeError(f"unexpected keyword argument {alias!r}{hint}")
        if name in values:
            message = f"{alias} is another name of a size that is given already: keep one of them"
            raise InvalidConfig(message, field=name)
        values[name] = value
    sizes = {_NAMES[name]: _checked(name, value) for name, value in values.items()}
    found = ParallelSizes(**sizes)
    check_ranks(found, found.tensor or 1, found.pipeline or 1)
    return found


def check_ranks(sizes: ParallelSizes, tensor: int, pipeline: int) -> None:
    """
    Check sizes against those of the groups of processes that share the model.

    Raises:
        InvalidConfig: They speak of other numbers, or of several runners in each process.
    """
    pairs = ((_TENSOR, sizes.tensor, tensor), (_PIPELINE, sizes.pipeline, pipeline))
    for name, given, found in pairs:
        if given not in (None, found):
            message = (
                f"{name} is {given}, but the group of processes has {found}: give the group's "
                "size, or pass the right group as pg_collection"
            )
            raise InvalidConfig(message, field=name)
    num_ranks = tensor * pipeline
    if num_ranks > 1 and sizes.num_runners > 1:
        message = (
            f"{_DATA} {sizes.num_runners} cannot be combined with a model on {num_ranks} "
            "processes: start one engine for each group of processes"
        )
        raise InvalidConfig(message, field=_DATA)


def check_world(sizes: ParallelSizes, num_processes: int) -> None:
    """
    Check sizes against the number of processes in the world.

    Raises:
        InvalidConfig: They need another number.
    """
    if sizes.num_ranks != num_processes:
        message = (
            f"{sizes.ranks_text}, but the group of processes has {num_processes}: start as many "
            "as the sizes need, or pass the right groups as pg_collection"
        )
        raise InvalidConfig(message, field=sizes.ranks_field)


def _checked(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        message = f"{name} must be a whole number of at least 1, got {value!r}"
        raise InvalidConfig(message, field=name)
    return value
