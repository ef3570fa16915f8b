"""Surroundings of every call: its id, the guard around its handler, the form of its errors."""
