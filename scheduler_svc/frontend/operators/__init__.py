"""Answers for operators: the admin service, profiles, and the page of metrics."""
