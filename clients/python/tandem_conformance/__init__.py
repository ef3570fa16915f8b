"""The program that plays a caller of the Python client, as clients/conformance/README.md says."""
