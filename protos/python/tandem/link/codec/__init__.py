"""Encoding of the step link's values as messages, and back."""
