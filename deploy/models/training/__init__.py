"""Trains, exports and evaluates the bundled model; see the model card for the commands."""
