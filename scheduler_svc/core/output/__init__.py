"""Results of a step: tokens, ends and log probabilities for their requests."""
