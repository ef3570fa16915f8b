"""Readers of many streams at once, for benchmarks; see `start_reader`."""

from tandem_bench.reader.counts import ReadCounts
from tandem_bench.reader.readers import Reader, start_reader

__all__ = ["ReadCounts", "Reader", "start_reader"]
