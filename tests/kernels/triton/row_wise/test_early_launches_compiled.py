"""Kernels that can be launched early, compiled for sm_90."""

from __future__ import annotations

import re

import pytest

from kernels.early_launch import launch_options, use_early_launches
from tests.kernels.triton.compiled import CompiledKernel, LaunchRequest, compile_launches

MEMORY = re.compile(r"\b(ld|st|atom|red)\.(global|volatile)|\bcp\.async")
WAIT, RELEASE = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.fixture(scope="module")
def launches() -> dict[bool, list[CompiledKernel]]:
    requests = [
        LaunchRequest(
            call="tests.kernels.triton.row_wise.early_launches:launch_layer", arguments={"on": on}
        )
        for on in (False, True)
    ]
    return dict(zip((False, True), compile_launches(requests), strict=True))


@pytest.mark.slow
class TestCompiled:
    def test_every_kernel_waits_before_it_touches_memory(self, launches):
        """
        In the order of instructions the wait comes first, then the next kernel may start, and only
        then is anything read or written.
        """
        assert 7 == len(launches[True])
        for kernel in launches[True]:
            wait, release = kernel.ptx.index(WAIT), kernel.ptx.index(RELEASE)
            first = MEMORY.search(kernel.ptx)
            assert first is not None, kernel.name
            assert wait < release < first.start(), kernel.name
            assert 1 == kernel.ptx.count(WAIT), kernel.name
            assert not kernel.spills

    def test_wait_is_in_the_path_of_all_programs(self, launches):
        """
        No branch comes before the wait, so that a kernel which has ended has always waited.
        """
        for kernel in launches[True]:
            before = kernel.ptx[: kernel.ptx.index(WAIT)]
            assert not re.search(r"\bbra\b|\bret\b", before), kernel.name

    def test_kernels_have_no_such_instructions_where_the_switch_is_off(self, launches):
        """
        The same kernels are launched, without waits.
        """
        names = [[kernel.name for kernel in launches[on]] for on in (False, True)]
        assert names[0] == names[1]
        assert not [kernel.name for kernel in launches[False] if "griddepcontrol" in kernel.ptx]


def test_switch_is_off_until_it_is_turned_on():
    """
    Kernels are launched in order, and early only between the two calls.
    """
    assert {"EARLY": False} == launch_options()
    use_early_launches(on=True)
    try:
        assert {"EARLY": True, "launch_pdl": True} == launch_options()
    finally:
        use_early_launches(on=False)
    assert {"EARLY": False} == launch_options()
