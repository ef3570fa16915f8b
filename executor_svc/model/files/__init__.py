"""Files of a model directory: weights, descriptions, tokenizer, fingerprint."""
