"""
Compiles Triton kernels for sm_90 where there is no GPU, and tells what they take.

Whether a kernel is interpreted is decided when it is decorated, so compiling needs a process of its
own without TRITON_INTERPRET. That process is this file run as a script: requests come as JSON on
its input, answers leave as JSON on its output.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CAPABILITY = 90
MAX_SHARED_BYTES = 227 * 1024
"""Shared memory in bytes that one block of threads may take on sm_90."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRequest:
    """
    One kernel to compile.

    Attributes:
        kernel: "package.module:function".
        types: Triton's names by argument that is not constexpr: "*bf16", "*i64", "i32", "fp32", ...
        constexprs: Values by argument; a text "tl.float16" stands for Triton's type.
        divisible: Integers known to be multiples of 16; pointers always are.
        num_warps: Of 32 threads each, per program.
        num_stages: Depth of software pipelining.
    """

    kernel: str
    types: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """
    A call with kernels that are to be compiled as they are launched there, options included.

    Attributes:
        call: "package.module:function"; it makes tensors on the CPU and calls a launch function.
            Nothing runs: what kernels would write stays unwritten.
        arguments: By name, as JSON has them.
    """

    call: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """
    Resources that a compiled kernel takes.

    Registers are per thread, `stack_bytes` and `local_bytes` too (not 0 means spills);
    `shared_bytes` is per program.
    """

    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    ptx: str

    @property
    def spills(self) -> bool:
        """Return whether registers overflow into memory."""
        return self.stack_bytes > 0 or self.local_bytes > 0


def compile_kernels(requests: Sequence[KernelRequest]) -> list[CompiledKernel]:
    """
    Compile for sm_90, in order; about 0.5 s each after 3 s for the process.

    Raises:
        AssertionError: A kernel does not compile; the message is the compiler's.
    """
    answers = _ask("kernels", requests)
    return [CompiledKernel(**answer) for answer in answers]


def compile_launches(requests: Sequence[LaunchRequest]) -> list[list[CompiledKernel]]:
    """Compile what each call launches, in order; otherwise as `compile_kernels`."""
    answers = _ask("launches", requests)
    return [[CompiledKernel(**launch) for launch in launches] for launches in answers]


def try_launches(requests: Sequence[LaunchRequest]) -> list[list[CompiledKernel] | str]:
    """Compile as `compile_launches`; a call that does not compile gives the compiler's message."""
    answers = _ask("tries", requests)
    return [
        answer if isinstance(answer, str) else [CompiledKernel(**launch) for launch in answer]
        for answer in answers
    ]


def _ask(kind: str, requests: Sequence[KernelRequest] | Sequence[LaunchRequest]) -> list[Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    )
    done = subprocess.run(
        [sys.executable, __file__, kind],
        input=json.dumps([asdict(request) for request in requests]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def compile_kernel(request: KernelRequest) -> CompiledKernel:
    """Compile one kernel."""
    return compile_kernels([request])[0]


def _compile(request: KernelRequest) -> CompiledKernel:
    import triton  # noqa: PLC0415  # in the compiling process only
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    module, name = request.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    unknown = (set(request.types) | set(request.constexprs)) ^ set(kernel.arg_names)
    assert not unknown, f"{request.kernel}: arguments missing or unknown: {sorted(unknown)}"
    divisible = [
        (place,)
        for place, argument in enumerate(kernel.arg_names)
        if request.types.get(argument, "").startswith("*") or argument in request.divisible
    ]
    source = ASTSource(
        fn=kernel,
        signature={name: request.types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={name: _constexpr(value) for name, value in request.constexprs.items()},
        attrs={place: [["tt.divisibility", 16]] for place in divisible},
    )
    options = {"num_warps": request.num_warps, "num_stages": request.num_stages}
    return _describe(
        triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    )


def _compile_launches(request: LaunchRequest) -> list[CompiledKernel]:
    # In the compiling process only.
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.runtime import driver, jit  # noqa: PLC0415

    launched: list[CompiledKernel] = []
    run = jit.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        launched.append(_describe(compiled))
        return compiled

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
        )
    )
    jit.JITFunction.run = compile_only
    try:
        module, name = request.call.split(":")
        getattr(importlib.import_module(module), name)(**request.arguments)
    finally:
        jit.JITFunction.run = run
    return launched


def _constexpr(value: Any) -> Any:
    import triton.language as tl  # noqa: PLC0415  # in the compiling process only

    if isinstance(value, str) and value.startswith("tl."):
        return getattr(tl, value.removeprefix("tl."))
    return value


def _describe(compiled: Any) -> CompiledKernel:
    from triton.backends import nvidia  # noqa: PLC0415  # in the compiling process only

    tool = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return CompiledKernel(
        name=compiled.metadata.name,
        registers=found["REG"],
        stack_bytes=found["STACK"],
        local_bytes=found["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        ptx=compiled.asm["ptx"],
    )


def _main(kind: str) -> list[Any]:
    requests = json.load(sys.stdin)
    if kind == "kernels":
        return [asdict(_compile(KernelRequest(**request))) for request in requests]
    compiles = _try_launches if kind == "tries" else _described_launches
    return [compiles(LaunchRequest(**request)) for request in requests]


def _described_launches(request: LaunchRequest) -> list[dict[str, Any]]:
    return [asdict(launch) for launch in _compile_launches(request)]


def _try_launches(request: LaunchRequest) -> list[dict[str, Any]] | str:
    try:
        return _described_launches(request)
    except Exception as error:  # noqa: BLE001  # whatever a compiler raises, others may compile
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


if __name__ == "__main__":
    print(json.dumps(_main(sys.argv[1])))  # noqa: T201  # the answer itself
