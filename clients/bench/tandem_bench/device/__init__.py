"""A device measured: timing, its ceilings, and operands and shapes to measure with."""
