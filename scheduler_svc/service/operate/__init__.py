"""Queries of operators: readings and commands."""
