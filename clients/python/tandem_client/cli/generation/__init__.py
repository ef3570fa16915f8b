"""Text from a model in the terminal, and the ids that stand for it."""
