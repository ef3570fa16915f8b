"""`python -m tandem_client` is the command `tandem`."""

from tandem_client.cli import main

if __name__ == "__main__":
    main()
