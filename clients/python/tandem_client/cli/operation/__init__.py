"""Commands for operators of a running server: requests, traces, pauses, hand-over, prefix cache."""
