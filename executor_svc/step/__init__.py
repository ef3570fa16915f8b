"""One step: from a batch to sampled tokens, eagerly or as a captured graph."""
