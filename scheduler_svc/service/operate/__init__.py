"""Queries that come through frontends, and those of them that command something."""
