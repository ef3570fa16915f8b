"""A stack of layers in C++ on the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.cpu_extension import load_library
from kernels.cpu_extension.library import NUMBER_TYPES
from kernels.layer_stack.weights import MATRICES, LayerSizes, LayerWeights
from kernels.paged_attention import AttentionPlan
from kernels.paged_attention.cpu_extension import ExtensionPlan

_VECTORS = (
    *("input_norm", "mlp_norm"),
    *("qk_norm", "qkv_bias", "output_bias", "gate_up_bias", "down_bias"),
)
_SIZES = (
    *("num_layers", "hidden_size", "inner_size", "num_heads", "num_kv_heads", "head_dim"),
    *("num_rows", "num_positions", "num_threads", "type"),
)
_POINTERS = ("layers", "hidden", "rotation", "kv_position", "narrow", "wide", "inner")


class _Matrix(ctypes.Structure):
    """The struct `Matrix` of layer_stack.cpp."""

    _fields_ = (
        *(("packed", ctypes.c_void_p), ("is_narrow", ctypes.c_int64)),
        ("num_chunks", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """The struct `Layer` of layer_stack.cpp."""

    _fields_ = (
        *((name, _Matrix) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in (*_VECTORS, "kv_cache", "plan")),
    )


class _Stack(ctypes.Structure):
    """The struct `Stack` of layer_stack.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_float) for name in ("norm_eps", "scale")),
    )


class Layers:
    """
    Addresses of the layers' weights, collected once; each call adds its caches and plans, so that
    calls must not overlap.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], sizes: LayerSizes, chunks: Mapping[str, int]
    ) -> None:
        self.sizes = sizes
        self.native = (_Layer * len(layers))()
        self._held = tuple(layers)
        for own, layer in zip(self.native, layers, strict=True):
            for name in MATRICES:
                matrix = getattr(layer, name)
                of_sums = chunks.get(name, 1)
                setattr(own, name, _Matrix(matrix.data_ptr(), matrix.is_narrow, of_sums))
            for name in _VECTORS:
                vector = getattr(layer, name)
                setattr(own, name, None if vector is None else vector.data_ptr())


def run(
    layers: Layers,
    hidden: Tensor,
    kv_layers: Sequence[Tensor],
    plans: Sequence[AttentionPlan],
    *,
    rotation: Tensor,
    kv_position: Tensor,
    norm_eps: float,
    scale: float,
) -> None:
    """
    Run all layers; arguments are as in `LayerStack`, unchecked.

    Raises:
        IndexError: As in `LayerStack`.
    """
    sizes, num_rows = layers.sizes, hidden.shape[0]
    num_blocks, block_size, _, num_kv_heads, head_dim = kv_layers[0].shape
    narrow = hidden.new_empty((num_rows, max(sizes.hidden, sizes.query)))
    wide = hidden.new_empty((num_rows, max(2 * sizes.inner, sizes.query + 2 * sizes.key)))
    inner = hidden.new_empty((num_rows, sizes.inner))
    num_threads = torch.get_num_threads()
    for own, kv_cache, plan in zip(layers.native, kv_layers, plans, strict=True):
        assert isinstance(plan, ExtensionPlan)
        plan.check_blocks(num_blocks)
        num_threads = min(num_threads, plan.native.num_threads)  # its scratch is for so many
        own.kv_cache = kv_cache.data_ptr()
        own.plan = ctypes.addressof(plan.native)
    stack = _Stack(
        num_layers=len(layers.native),
        hidden_size=sizes.hidden,
        inner_size=sizes.inner,
        num_heads=sizes.query // head_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_rows=num_rows,
        num_positions=num_blocks * block_size,
        num_threads=num_threads,
        type=NUMBER_TYPES[hidden.dtype],
        layers=ctypes.addressof(layers.native),
        hidden=hidden.data_ptr(),
        rotation=rotation.data_ptr(),
        kv_position=kv_position.data_ptr(),
        narrow=narrow.data_ptr(),
        wide=wide.data_ptr(),
        inner=inner.data_ptr(),
        norm_eps=norm_eps,
        scale=scale,
    )
    outside = _library().tandem_layer_stack(ctypes.byref(stack))
    if outside >= 0:
        raise IndexError(
            f"position {outside} is outside a cache of {num_blocks * block_size} positions"
        )


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library and declare the types of the functions called here."""
    library = load_library()
    for name in ("tandem_layer_bytes", "tandem_stack_bytes", "tandem_layer_stack"):
        getattr(library, name).restype = ctypes.c_int64
    assert library.tandem_layer_bytes() == ctypes.sizeof(_Layer)
    assert library.tandem_stack_bytes() == ctypes.sizeof(_Stack)
    library.tandem_layer_stack.argtypes = (ctypes.POINTER(_Stack),)
    return library
