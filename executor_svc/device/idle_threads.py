"""The way OpenMP's threads wait; free of PyTorch, which must be imported later."""

from __future__ import annotations

from collections.abc import MutableMapping


def let_idle_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """
    Keep OpenMP's threads from spinning between operations, unless the environment says otherwise.

    Where cores are shared (containers, laptops), a spinning thread takes the core that the working
    one needs: measured on two busy cores, a decode step took 70 ms instead of 7. OpenMP reads the
    variable when PyTorch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environ.keys():
        environ["OMP_WAIT_POLICY"] = "PASSIVE"
