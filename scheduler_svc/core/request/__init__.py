"""Requests as frontend and core share them: description, events, options of the scheduler."""
