"""Decoder families from a Hugging Face directory: description, weights and forward pass."""
