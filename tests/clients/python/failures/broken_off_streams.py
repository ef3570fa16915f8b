"""
Program that breaks out of streams, and ends while its client and its streams are still there.

Usage: python -m tests.clients.python.failures.broken_off_streams ADDRESS NUM
"""

import sys

from tandem_client import Client

client = Client(sys.argv[1])
streams = [client.generate("one") for _ in range(int(sys.argv[2]))]
for stream in streams:
    for text in stream.text:
        sys.stdout.write(f"{text}\n")
        break
