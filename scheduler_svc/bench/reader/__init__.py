"""Readers of many streams at once, for benchmarks; see `start_reader`."""

from scheduler_svc.bench.reader.counts import ReadCounts
from scheduler_svc.bench.reader.readers import Reader, start_reader

__all__ = ["ReadCounts", "Reader", "start_reader"]
