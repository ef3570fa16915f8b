"""Views of a running server for people: looks at it, and the model that screens and pages draw."""
