"""Decode steps of models with random weights, and the least time that they could take."""
