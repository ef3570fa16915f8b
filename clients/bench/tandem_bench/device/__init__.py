"""Measurements on a device: timing, ceilings, and the operands and shapes to measure with."""
