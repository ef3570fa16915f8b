"""The tokens of an Update, decoded without the code that writes or reads them."""

import numpy as np

from scheduler_svc.ipc.messages import CoreMessage, Update


def token_rows(update: CoreMessage) -> list[tuple[int, int, int]]:
    """Return (stream, offset, token) of each token, step by step."""
    assert isinstance(update, Update)
    streams = np.frombuffer(update.token_stream, "<u4").tolist()
    offsets = np.frombuffer(update.token_offset, "<i4").tolist()
    tokens = np.frombuffer(update.token, "<i4").tolist()
    assert len(streams) == len(offsets)
    num_rows = len(tokens) // max(1, len(streams))
    assert len(tokens) == num_rows * len(streams)
    return [
        (stream, offset + row, tokens[row * len(streams) + at])
        for row in range(num_rows)
        for at, (stream, offset) in enumerate(zip(streams, offsets, strict=True))
    ]
