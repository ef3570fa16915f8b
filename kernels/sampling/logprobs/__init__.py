"""Logprobs of drawn tokens and of the top ids."""
