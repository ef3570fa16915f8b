"""
Kernels in C++ for the CPU: compiled once on the machine that runs them, kept in a cache, called
through ctypes, which lets other Python threads run meanwhile.

The library is optional: if it cannot be loaded, PyTorch computes, and a warning is logged.
"""

from kernels.cpu_extension.library import ExtensionUnavailable, load_library

__all__ = ["ExtensionUnavailable", "load_library"]
