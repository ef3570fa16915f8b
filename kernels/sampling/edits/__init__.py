"""Edits of logits before the temperature: biases and penalties."""
