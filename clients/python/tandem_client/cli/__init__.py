"""The command line, `tandem`: `tandem --help` lists what it can do."""

from tandem_client.cli.app import main

__all__ = ["main"]
