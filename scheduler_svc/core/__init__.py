"""The scheduler's pure state machine: no I/O, no clock, no randomness of its own."""
