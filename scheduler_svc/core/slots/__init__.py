"""Running rows: their tokens, blocks and ends, by slot."""
