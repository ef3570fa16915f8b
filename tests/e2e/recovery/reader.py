"""
A client to be killed: it prints the name of every event of one stream, one per line.

Arguments: address, number of prompt ids, max_tokens.
"""

from __future__ import annotations

import sys

from tandem_client import NO_RETRY, Client


def main() -> None:
    """Read one stream to its end."""
    address, num_ids, max_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Client(address, retry=NO_RETRY) as client:
        token_ids = [5 + index % 50 for index in range(num_ids)]
        for event in client.generate(token_ids=token_ids, max_tokens=max_tokens, ignore_eos=True):
            sys.stdout.write(type(event).__name__ + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
