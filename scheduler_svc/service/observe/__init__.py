"""Metrics, log lines and answers to operators about the whole service."""
