"""Load for a running server: requests, processes that send them, and what they measured."""
