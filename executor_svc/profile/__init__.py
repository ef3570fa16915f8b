"""Traces of steps, recorded with PyTorch's profiler when an operator asks for one."""
