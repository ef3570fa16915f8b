"""Executors that serve requests: links and sessions, and what follows from them."""
