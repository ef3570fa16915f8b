"""The command line, `tandem`: `tandem --help` lists what it can do."""

import signal


def main() -> None:
    """Run the command that the arguments name."""
    # Loading takes a moment and leaves nothing to clean up: Ctrl-C then just ends it, in silence.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tandem_client.cli import app  # noqa: PLC0415 -- see above

    app.main()


__all__ = ["main"]
