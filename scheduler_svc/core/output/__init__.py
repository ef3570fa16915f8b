"""Output processing: tokens, ends and log probabilities of a step's result."""
