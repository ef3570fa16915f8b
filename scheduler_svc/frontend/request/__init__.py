"""Checks of a call's arguments, and the request that the core takes."""
