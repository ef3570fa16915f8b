"""Steps captured once and replayed: their shapes, their capture, and the match of batches."""
