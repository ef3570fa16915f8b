"""Streams of completions, and how they go on after a break."""
