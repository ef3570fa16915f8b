"""Checks of a call's arguments, and the making of the request that the core takes."""
