"""The scheduler core measured: the cost of one decode-only turn and of an admission."""
