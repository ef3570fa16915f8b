"""The device that an executor computes on: its choice, its memory, its queue and its threads."""
