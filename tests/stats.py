"""Statistics of a server, made for a test."""

from tandem.admin.v1.stats_pb2 import GetStatsResponse


def changed(stats: GetStatsResponse, **changes: object) -> GetStatsResponse:
    """Return a copy with other values of some fields."""
    values = {field.name: getattr(stats, field.name) for field in stats.DESCRIPTOR.fields}
    return GetStatsResponse(**(values | changes))
