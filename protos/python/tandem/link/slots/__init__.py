"""Slot state that both ends of the step link hold, its checks and its hash."""
