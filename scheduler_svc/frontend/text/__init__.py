"""Text and tokens: templates, tokenizer, detokenizer, stop strings."""
