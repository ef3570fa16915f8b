"""
Step link as pure state machines: no sockets, no threads, no clock. Both ends and the tests share
it.
"""

PROTOCOL_VERSION = 6
"""Version of tandem.executor.v1's step protocol; Describe and OpenSession compare it."""
MAX_STAGES = 64
"""Most pipeline stages of an executor."""
MAX_CHUNK_BYTES = 1 << 20
"""Most bytes of a file, of a tokenizer or of a trace, in one message of tandem.executor.v1."""
MAX_LEASE_MS = 60_000
"""Longest lease of a session: a holder that is gone shuts others out no longer."""
