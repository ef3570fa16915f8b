"""Views of a running server for people: its snapshots, and the model that screens draw."""
