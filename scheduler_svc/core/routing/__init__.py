"""Preferences of requests among several executors."""
