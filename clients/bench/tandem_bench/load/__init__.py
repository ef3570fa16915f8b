"""Load tests of a running server: requests, processes that send them, and their measurements."""
