"""Spans of requests for OpenTelemetry; nothing here costs anything where no collector is set."""
