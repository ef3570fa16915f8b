"""The state of slots on the device: tokens, sampling parameters, and their mirror on the host."""
