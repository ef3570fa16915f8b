"""Client-facing processes: validate, tokenize, detokenize, stream."""
