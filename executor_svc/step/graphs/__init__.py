"""Steps captured once and replayed: their shapes, their capture, and what runs in which."""
