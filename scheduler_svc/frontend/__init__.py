"""Client-facing processes, which validate, tokenize, detokenize and stream."""
