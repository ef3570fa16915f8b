"""
Device operations, one folder each: `reference.py` is the definition, other files are faster
implementations.
"""
