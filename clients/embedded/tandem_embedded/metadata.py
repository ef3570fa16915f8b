"""Request metadata: numbers of each request that a logits hook reads, checked at the submission."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from executor_svc.slots.metadata import MetadataType, checked_types, is_known
from tandem.errors import InvalidConfig
from tandem_embedded.errors import ValidationError
from tandem_embedded.params import GenerationParams

if TYPE_CHECKING:
    from executor_svc.slots.logits_hook import HookFunction

_Ends = Collection[int]
_DERIVED: Mapping[str, Callable[[GenerationParams, _Ends], float]] = {
    "termination_id": lambda _, ends: min(ends, default=-1),
    "return_log_probs": lambda params, _: params.logprobs is not None,
    "skip_prompt_log_probs": lambda params, _: params.prompt_logprobs is None,
    "top_n_logprobs": lambda params, _: params.logprobs or 0,
}
"""Numbers that follow from the parameters in force and the ids that end the output."""


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """
    The metadata types of an engine.

    A label that `executor_svc.slots.metadata` knows gets its number from the request's parameters.
    The number of any other is the request's own: `GenerationParams.metadata` must have exactly
    these.

    Attributes:
        types: The types.
        hook: The function that reads the numbers; None leaves them to a runner of the caller's.
    """

    types: tuple[MetadataType, ...] = ()
    hook: HookFunction | None = None

    def check(self, params: GenerationParams) -> None:
        """
        Check that a request has a number of the right type for each label of its own, and no other.

        Raises:
            ValidationError: Its metadata do not fit; the message names the first mistake.
        """
        given: Any = params.metadata
        if not self.types and given == {}:
            return
        if not isinstance(given, Mapping):
            raise _misfit(f"metadata must map labels to numbers, got {given!r}")
        own = {one.label: one for one in self.types if not is_known(one.label)}
        for label in given:
            if label not in own:
                labels = ", ".join(own) or "none"
                raise _misfit(
                    f"request_metadata_types has no {label!r} that a request sets, it has {labels}"
                )
        for label, one in own.items():
            if label not in given:
                raise _misfit(f"metadata lacks {label!r}, a {one.dtype} of request_metadata_types")
            if one.number(given[label]) is None:
                raise _misfit(f"{label!r} must be a {one.dtype}, got {given[label]!r}")

    def of_row(self, params: GenerationParams, ends: _Ends) -> tuple[tuple[str, float], ...]:
        """
        Return the numbers that go to the executor beside the sampling parameters.

        Args:
            params: Checked parameters, with defaults filled in.
            ends: Ids that end the output.
        """
        found = []
        for one in self.types:
            derived = _DERIVED.get(one.label)
            if derived is not None:
                found.append((one.label, derived(params, ends)))
            elif not is_known(one.label):
                number = one.number(params.metadata[one.label])
                assert number is not None, "check was called"
                found.append((one.label, number))
        return tuple(found)


def metadata_of(hook: HookFunction | None, types: object, *, has_backend: bool) -> RequestMetadata:
    """
    Return the metadata of an engine's requests, after a check of its settings.

    Args:
        hook: The engine's `logits_hook`.
        types: Its `request_metadata_types`.
        has_backend: True if the engine has runners of the caller's.

    Raises:
        InvalidConfig: A type is wrong, or a setting would have no effect.
    """
    if hook is not None and not callable(hook):
        raise InvalidConfig(
            f"logits_hook must be a function of logits and rows, got {hook!r}", field="logits_hook"
        )
    if hook is not None and has_backend:
        raise InvalidConfig(
            "logits_hook has no effect with a backend of your own: its runner draws the tokens",
            field="logits_hook",
        )
    if types is not None and hook is None and not has_backend:
        raise InvalidConfig(
            "request_metadata_types has no effect without a logits_hook, which reads the numbers",
            field="request_metadata_types",
        )
    if types is None and hook is None:
        return RequestMetadata()
    return RequestMetadata(checked_types(types), hook)


def _misfit(what: str) -> ValidationError:
    message = f"Request added to context with invalid metadata types: {what}."
    return ValidationError(message, reason="INVALID_PARAMETER", field="metadata")
