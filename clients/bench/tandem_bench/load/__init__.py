"""Load test of a running server: requests, processes that send them, and measurements."""
