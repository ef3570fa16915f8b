"""Python client and command line of Tandem."""
