"""A model directory as it lies on disk: weights, descriptions, tokenizer, fingerprint."""
