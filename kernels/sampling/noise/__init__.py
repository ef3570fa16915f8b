"""Counter-based noise, on any device."""
