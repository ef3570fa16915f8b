"""The choice of an executor's device, number type and CPU kernels."""

from __future__ import annotations

from importlib.util import find_spec
from typing import cast, get_args

import torch

from executor_svc.device.out_of_memory import is_out_of_memory
from executor_svc.start_warnings import keep
from kernels import packed_linear, rms_norm, rope_kv_write, sampling, silu_mul
from kernels.cpu_extension import ExtensionUnavailable
from kernels.cpu_features import cpu_has_any
from kernels.paged_attention import CpuExtension, use_cpu_extension
from tandem.errors import InvalidConfig
from tandem.installation import install_command

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_CUDA_FAILED = ("CUDA error", "Triton Error [CUDA]")
"""
Parts of the messages in which PyTorch or Triton, whichever is called next, reports a device's
earlier error.
"""


class CaptureBroken(RuntimeError):
    """
    An error ended the capture of a graph. PyTorch's allocator still waits for the capture's end, so
    that the device is of no use to this process any more.
    """


def is_sticky(error: Exception) -> bool:
    """
    Tell whether the device is lost for this process: CUDA errors other than out of memory, and a
    capture that an error ended.
    """
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError | CaptureBroken) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _CUDA_FAILED)
    )


def choose_kernels(device: torch.device, cpu_extension: str) -> None:
    """
    Let the CPU compute in C++ or in PyTorch; may compile, which takes seconds.

    Args:
        device: The model's device; devices other than the CPU have kernels of their own.
        cpu_extension: "auto", "on" or "off".

    Raises:
        InvalidConfig: `cpu_extension` is another word, or it is "on" and the library can neither be
            found nor built.
    """
    if cpu_extension not in get_args(CpuExtension):
        raise InvalidConfig(
            f"cpu_extension must be auto, on or off, got {cpu_extension!r}", field="cpu_extension"
        )
    if device.type != "cpu":
        return
    try:
        why_not = use_cpu_extension(cast("CpuExtension", cpu_extension))
    except ExtensionUnavailable as error:
        raise InvalidConfig(
            f"cpu_extension is on, but its library cannot be had: {error}; set it to auto or off "
            f"to compute with PyTorch",
            field="cpu_extension",
        ) from error
    if why_not is not None:
        keep(f"PyTorch computes, and not the C++ kernels, which are faster: {why_not}")
    in_cpp = packed_linear.use_cpu_extension(wanted=cpu_extension != "off")
    for operation in (rms_norm, rope_kv_write, sampling, silu_mul):
        operation.use_cpu_extension(wanted=in_cpp)


def resolve_device(name: str) -> torch.device:
    """
    Turn "auto", "cpu", "cuda" or "cuda:N" into a device.

    Raises:
        InvalidConfig: The name is another one, the CUDA device does not exist, or Triton, in which
            its kernels are written, is not installed.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in {"cpu", "cuda"} or (index and not index.isdecimal()):
        raise InvalidConfig(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidConfig(
            f"device {name!r} was asked for but PyTorch finds no CUDA device; use --device cpu"
        )
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise InvalidConfig(
            f"device {name!r} was asked for but there are {torch.cuda.device_count()} CUDA devices"
        )
    if find_spec("triton") is None:
        raise InvalidConfig(
            f"device {name!r} needs Triton, which is not installed: {install_command('gpu')}, or "
            "use --device cpu"
        )
    return torch.device("cuda", number)


def resolve_dtype(name: str, checkpoint_dtype: str | None, device: torch.device) -> torch.dtype:
    """
    Turn "auto" or a type's name into a type; see `choose_dtype`.

    Raises:
        InvalidConfig: The name is another one.
    """
    return choose_dtype(name, checkpoint_dtype, device)[0]


def choose_dtype(
    name: str, checkpoint_dtype: str | None, device: torch.device
) -> tuple[torch.dtype, str]:
    """
    Turn "auto" or a type's name into a type, and give the reason as a clause.

    On a GPU "auto" is the checkpoint's own type, or bfloat16 if it names none. On a CPU it is:

    - float32 for checkpoints in float32, or without a type;
    - bfloat16 for 16-bit checkpoints if the processor has amx_bf16;
    - bfloat16 for checkpoints in bfloat16 if the processor has avx512_bf16; for those in float16,
      which bfloat16 would round, only if our C++ kernels are not used;
    - float32 otherwise. Our C++ kernels keep weights that came in bfloat16 in 2 bytes all the same.

    `tests/bench/dtypes` measures it.

    Args:
        name: "auto" or a type's name.
        checkpoint_dtype: The checkpoint's type as config.json names it.
        device: The model's device; `choose_kernels` has been called for it.

    Raises:
        InvalidConfig: The name is another one.
    """
    if name != "auto":
        if name not in DTYPES:
            raise InvalidConfig(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
        return DTYPES[name], "it is set"
    if device.type == "cuda":
        return DTYPES[checkpoint_dtype or "bfloat16"], "the checkpoint is, or names no type"
    if checkpoint_dtype not in {"bfloat16", "float16"}:
        return torch.float32, "the checkpoint is, or names no type"
    in_cpp = packed_linear.can_pack(torch.float32, device)
    return _for_16_bits_on_a_cpu(checkpoint_dtype, in_cpp=in_cpp)


def _for_16_bits_on_a_cpu(checkpoint_dtype: str, *, in_cpp: bool) -> tuple[torch.dtype, str]:
    if cpu_has_any("amx_bf16"):
        return torch.bfloat16, "the processor multiplies tiles of bfloat16 (amx_bf16)"
    is_kept = checkpoint_dtype == "bfloat16" or not in_cpp
    if is_kept and cpu_has_any("avx512_bf16"):
        return torch.bfloat16, "the processor multiplies it (avx512_bf16)"
    if in_cpp:
        return torch.float32, "our kernels multiply with it, and bfloat16 weights stay in 2 bytes"
    return torch.float32, "the processor does not multiply bfloat16"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the type's name as configuration and wire protocol spell it."""
    return str(dtype).removeprefix("torch.")


def cpu_multiplies_bfloat16() -> bool:
    """
    Tell whether this processor has bfloat16 dot products; emulated ones are slower than float32.
    """
    return cpu_has_any("avx512_bf16", "amx_bf16")
