"""Loading of an engine's runners: models, limits and KV memory; it imports PyTorch when called."""
