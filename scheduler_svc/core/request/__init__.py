"""A request as frontend and core share it: its description, its events, its options."""
