"""
The switch of early launches on a GPU (programmatic dependent launch, from Hopper on): a kernel's
programs start while the kernel before it ends, and wait there before they touch memory.

A kernel that was launched so waits, in every program and before all else, until the kernel before
it has ended and its results can be read. That kernel has waited likewise, or was launched without
the option and so began only after all before it had ended: everything earlier is over, as without
the switch. Only the start of programs overlaps. Kernels of libraries are launched as ever.

The switch is off: it has not run on a device. A captured graph keeps what was set at its capture.
"""

from __future__ import annotations

_is_on = False


def use_early_launches(*, on: bool) -> None:
    """Launch kernels that can be launched early so from now on, or no longer."""
    global _is_on  # noqa: PLW0603  # one device is launched to, in one way
    _is_on = on


def launch_options() -> dict[str, bool]:
    """Return the constant and the option with which such a kernel is launched now."""
    return {"EARLY": True, "launch_pdl": True} if _is_on else {"EARLY": False}
