"""
Names of the settings of the executor's computation, for files that serve both services: the
scheduler ignores them. Their meaning is in `executor_svc.config.settings`.
"""

from __future__ import annotations

COMPUTING = (
    "batch_invariant",
    "num_threads",
    "cpu_extension",
    "num_cuda_graphs",
    "cuda_graph_mixed_prefill_count",
    "use_cuda_graphs_for_non_decode_steps",
)
"""Names of these settings, in the order of `tandem up --help`."""
