"""`python -m tandem_client` is the command `tandem`."""

import signal

if __name__ == "__main__":
    # Ctrl-C ends the process in silence from here on: the imports below take a moment.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tandem_client.cli import main

if __name__ == "__main__":
    main()
