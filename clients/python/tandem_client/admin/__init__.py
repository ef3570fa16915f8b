"""Clients of the admin API, and its plain values."""

from tandem_client.admin.client import AdminClient, Setting, Stats, is_serving

__all__ = ["AdminClient", "Setting", "Stats", "is_serving"]
