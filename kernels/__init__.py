"""
Device operations, one folder each: `reference.py` is the definition, other files are faster ways to
the same.
"""

__version__ = "0.1.0"
