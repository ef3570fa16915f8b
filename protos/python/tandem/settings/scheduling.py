"""
Names of the settings of the scheduler's policies, for files that serve both services: the executor
ignores them. Their meaning is in `scheduler_svc.config.scheduling`.
"""

from __future__ import annotations

SCHEDULING = (
    "schedule_policy",
    "schedule_conservativeness",
    "ageing_s",
    "priority_preemption",
    "enable_prefix_caching",
    "prefix_caching_eviction_policy",
    "on_pressure",
    "overlength_policy",
    "max_queued_requests",
    "max_queued_tokens",
    "max_tenant_requests",
    "victim_rule",
    "paused_budget_blocks",
    "paused_buffer_size_gb",
    "preemption_mode",
    "step_priority",
    "enable_chunked_prefill",
    "chunked_prefill_size",
    "long_prefill_threshold",
    "max_prefill_share",
    "window",
    "run_ahead",
    "track_request_events",
    "track_generated_token_events",
    "track_paused_request_events",
)
"""Names of these settings, in the order of the documentation."""

SCHEDULING_ALIASES = {
    "prefix_caching": "enable_prefix_caching",
    "chunked_prefill": "enable_chunked_prefill",
    "eviction": "prefix_caching_eviction_policy",
    "overlength": "overlength_policy",
    "long_prefill_token_threshold": "long_prefill_threshold",
    "track_token_events": "track_generated_token_events",
    "track_paused_events": "track_paused_request_events",
}
"""Other accepted spellings, in every source."""
