"""
Products with a weight that was brought once into the order in which they read it (packed).

A step of a few rows reads every weight and does little with it. The framework's float32 products
copy each weight into their own order at every call, which takes longer than the products; these
read it in place. A row's bits depend on the row and the weight alone, and a column's not on other
columns.

Most checkpoints hold bfloat16. A weight with only bfloat16 numbers is kept in that type: nothing is
rounded, and half as much memory is read, which bounds the time of few rows. For rows of float32 it
is widened in registers: products have the bits that float32 weights would give. For rows of
bfloat16 it is multiplied in pairs if the processor can (AVX512_BF16), else widened as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu_extension import ExtensionUnavailable, load_library
from kernels.dispatch import CPU_EXTENSION, Operation
from kernels.linear import check_chunks
from kernels.packed_linear import cpu_extension, reference

__all__ = [
    "PackedWeight",
    "can_pack",
    "check_even_chunks",
    "packed_dtype",
    "packed_elements",
    "packed_linear",
    "use_cpu_extension",
]

_TYPES = (torch.float32, torch.bfloat16)
_DEFINITION_PANEL = 16
_LOWER_HALF = 0xFFFF
_NUMBERS_AT_ONCE = 1 << 20

_Product = Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None, int, torch.dtype], Tensor]

_operation: Operation[_Product] = Operation("packed_linear", reference.packed_linear)


class PackedWeight(Tensor):
    """
    A weight of N rows in panels, float32 ``[ceil(N / panel), K, panel]`` or, if that loses nothing,
    bfloat16 ``[ceil(N / panel), K / 2, panel, 2]``; PyTorch's operations cannot use it as a matrix.
    """

    num_columns: int
    """Number of columns of a product, N."""

    # Operations on it return plain tensors, as with torch.nn.Parameter, not objects of this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def of(cls, weight: Tensor, memory: Tensor | None = None) -> PackedWeight:
        """
        Pack float32 or bfloat16 ``[N, K]``.

        Args:
            weight: The weight, which is not changed.
            memory: Contiguous tensor for the result, of `packed_elements` elements, in the type of
                `packed_dtype` or float32. None allocates one of `packed_dtype`.

        Raises:
            ValueError: The type, number of dimensions or number of elements is another.
        """
        if weight.dtype not in _TYPES or weight.ndim != 2:
            raise ValueError(
                f"a weight to be packed must be float32 or bfloat16 of shape [N, K], got "
                f"{weight.dtype} {list(weight.shape)}"
            )
        num_elements, dtype = packed_elements(*weight.shape), packed_dtype(weight)
        if memory is None:
            memory = torch.empty(num_elements, dtype=dtype)
        elif memory.shape != (num_elements,) or memory.dtype not in (dtype, torch.float32):
            raise ValueError(
                f"memory of this packed weight must be {dtype} of shape [{num_elements}], got "
                f"{memory.dtype} {list(memory.shape)}"
            )
        packed = reference.pack(weight, _panel(), memory.dtype)
        packed = memory.view(packed.shape).copy_(packed).as_subclass(cls)
        packed.num_columns = weight.shape[0]
        return packed

    @property
    def is_narrow(self) -> bool:
        """True if it is kept in bfloat16."""
        return self.dtype == torch.bfloat16

    @property
    def width(self) -> int:
        """Number of elements of a row that it multiplies, K."""
        return 2 * self.shape[1] if self.is_narrow else self.shape[1]

    def rows(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return some rows, int ``[T]`` to ``[T, K]`` of a type that holds the weight's numbers."""
        panel = self.shape[2]
        rows = self.as_subclass(Tensor)[index // panel, :, index % panel]
        return rows.flatten(1).to(dtype).contiguous()


def use_cpu_extension(*, wanted: bool) -> bool:
    """
    Let the CPU multiply packed weights in C++ or not, for the whole process; weights packed before
    a change cannot be used after it.

    Returns:
        True if it does; False if that is not wanted or the library is not available.
    """
    _operation.withdraw("cpu", CPU_EXTENSION)
    if not wanted:
        return False
    try:
        load_library()
    except ExtensionUnavailable:
        return False  # `paged_attention` has logged the reason
    _operation.offer("cpu", CPU_EXTENSION, cpu_extension.packed_linear)
    return True


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """
    Tell whether weights are to be packed: for float32 or bfloat16 on a CPU that multiplies them in
    C++.
    """
    if device.type != "cpu" or _operation.on(device) is not cpu_extension.packed_linear:
        return False
    return dtype in _TYPES


def packed_dtype(weight: Tensor) -> torch.dtype:
    """
    Return the type that ``[N, K]`` is packed in: bfloat16 if it can hold all of the numbers and K
    is even, so that pairs are whole, else float32.
    """
    if weight.shape[1] % 2 or not weight.numel():
        return torch.float32
    if weight.dtype == torch.bfloat16:
        return torch.bfloat16
    pieces = torch.split(weight.contiguous().view(torch.int32).flatten(), _NUMBERS_AT_ONCE)
    is_wide = any(bool((piece & _LOWER_HALF).any()) for piece in pieces)
    return torch.float32 if is_wide else torch.bfloat16


def packed_elements(num_columns: int, width: int) -> int:
    """Return the number of elements of a packed weight ``[num_columns, width]``."""
    return -(-num_columns // _panel()) * _panel() * width


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    num_chunks: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """
    Multiply rows by a weight, and add bias and residual if given.

    Args:
        x: float32 or bfloat16, shape ``[T, K]``, elements of a row adjacent.
        weight: Packed weight of shape ``[N, K]``.
        bias: Type of the result, shape ``[N]``.
        residual: Same type, shape ``[T, N]``, contiguous. Overwritten with the sum.
        num_chunks: Parts of K that are summed from zero each and added as a binary tree; as in
            `kernels.linear.linear`, but chunks have an even width.
        dtype: Type of the result: that of `x` if None, or float32.

    Returns:
        ``[T, N]``; it is `residual` if that is given. Sums are float32, and rounded once, when all
        is added.

    Raises:
        ValueError: Shapes, types or strides are not as described.
    """
    kind = dtype or x.dtype
    if x.ndim != 2 or x.dtype not in _TYPES or x.shape[1] != weight.width or x.stride(1) != 1:
        raise ValueError(
            f"x must be float32 or bfloat16 of shape [T, {weight.width}] with adjacent elements, "
            f"got {x.dtype} {list(x.shape)} with strides {list(x.stride())}"
        )
    if kind not in (x.dtype, torch.float32):
        raise ValueError(f"a product of {x.dtype} can be had in that type or float32, not {kind}")
    if num_chunks != 1:
        check_even_chunks(num_chunks, weight.width)
    _check("bias", bias, (weight.num_columns,), kind)
    _check("residual", residual, (x.shape[0], weight.num_columns), kind)
    multiply = _operation.on(x.device)
    return multiply(x, weight, weight.num_columns, bias, residual, num_chunks, kind)


def check_even_chunks(num_chunks: int, width: int) -> None:
    """
    Check that so many equal chunks of whole words make up a width, and a binary tree.

    Raises:
        ValueError: They do not.
    """
    check_chunks(num_chunks, width)
    if num_chunks > 1 and width // num_chunks % 2:
        raise ValueError(f"{num_chunks} chunks of a width of {width} must be even")


def _check(name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if given is None:
        return
    if given.shape != shape or given.dtype != dtype or not given.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape {list(shape)}, got {given.dtype} "
            f"{list(given.shape)} with strides {list(given.stride())}"
        )


def _panel() -> int:
    is_native = _operation.on(torch.device("cpu")) is cpu_extension.packed_linear
    return cpu_extension.panel() if is_native else _DEFINITION_PANEL
