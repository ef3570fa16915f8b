from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatsResponse(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "used_blocks", "free_blocks", "total_blocks", "block_size", "accepted_requests", "finished_requests", "failed_requests", "refused_requests", "prefill_tokens", "output_tokens", "preemptions", "steps", "steps_in_flight", "executor_attached", "draining", "uptime_s", "cached_blocks", "token_usage", "prefix_cache_lookup_tokens", "prefix_cache_hit_tokens", "retractions", "paused_requests", "swapped_requests", "new_token_ratio", "host_blocks", "used_host_blocks", "refused_by_limit", "queued_tokens", "schedule_s", "schedule_policy", "suspended", "swapped_out_blocks", "swapped_in_blocks", "swap_fallbacks", "executor_sessions", "executor_reattachments", "executor_losses", "steps_sent_again", "recomputed_tokens", "state_hash_mismatches", "executor_fencings", "executor_address", "executor_refusal", "executor_deaths", "suspected_requests", "poison_requests", "graph_steps", "executor_queued_s", "executor_forward_s", "executor_sample_s", "out_of_memory_steps")
    class RefusedByLimitEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_USAGE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_RATIO_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_S_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_POLICY_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_REATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_LOSSES_FIELD_NUMBER: _ClassVar[int]
    STEPS_SENT_AGAIN_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FENCINGS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_DEATHS_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    POISON_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_MEMORY_STEPS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    used_blocks: int
    free_blocks: int
    total_blocks: int
    block_size: int
    accepted_requests: int
    finished_requests: int
    failed_requests: int
    refused_requests: int
    prefill_tokens: int
    output_tokens: int
    preemptions: int
    steps: int
    steps_in_flight: int
    executor_attached: bool
    draining: bool
    uptime_s: float
    cached_blocks: int
    token_usage: float
    prefix_cache_lookup_tokens: int
    prefix_cache_hit_tokens: int
    retractions: int
    paused_requests: int
    swapped_requests: int
    new_token_ratio: float
    host_blocks: int
    used_host_blocks: int
    refused_by_limit: _containers.ScalarMap[str, int]
    queued_tokens: int
    schedule_s: float
    schedule_policy: str
    suspended: bool
    swapped_out_blocks: int
    swapped_in_blocks: int
    swap_fallbacks: int
    executor_sessions: int
    executor_reattachments: int
    executor_losses: int
    steps_sent_again: int
    recomputed_tokens: int
    state_hash_mismatches: int
    executor_fencings: int
    executor_address: str
    executor_refusal: str
    executor_deaths: int
    suspected_requests: int
    poison_requests: int
    graph_steps: int
    executor_queued_s: float
    executor_forward_s: float
    executor_sample_s: float
    out_of_memory_steps: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., used_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., accepted_requests: _Optional[int] = ..., finished_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., refused_requests: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., steps: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., executor_attached: _Optional[bool] = ..., draining: _Optional[bool] = ..., uptime_s: _Optional[float] = ..., cached_blocks: _Optional[int] = ..., token_usage: _Optional[float] = ..., prefix_cache_lookup_tokens: _Optional[int] = ..., prefix_cache_hit_tokens: _Optional[int] = ..., retractions: _Optional[int] = ..., paused_requests: _Optional[int] = ..., swapped_requests: _Optional[int] = ..., new_token_ratio: _Optional[float] = ..., host_blocks: _Optional[int] = ..., used_host_blocks: _Optional[int] = ..., refused_by_limit: _Optional[_Mapping[str, int]] = ..., queued_tokens: _Optional[int] = ..., schedule_s: _Optional[float] = ..., schedule_policy: _Optional[str] = ..., suspended: _Optional[bool] = ..., swapped_out_blocks: _Optional[int] = ..., swapped_in_blocks: _Optional[int] = ..., swap_fallbacks: _Optional[int] = ..., executor_sessions: _Optional[int] = ..., executor_reattachments: _Optional[int] = ..., executor_losses: _Optional[int] = ..., steps_sent_again: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., state_hash_mismatches: _Optional[int] = ..., executor_fencings: _Optional[int] = ..., executor_address: _Optional[str] = ..., executor_refusal: _Optional[str] = ..., executor_deaths: _Optional[int] = ..., suspected_requests: _Optional[int] = ..., poison_requests: _Optional[int] = ..., graph_steps: _Optional[int] = ..., executor_queued_s: _Optional[float] = ..., executor_forward_s: _Optional[float] = ..., executor_sample_s: _Optional[float] = ..., out_of_memory_steps: _Optional[int] = ...) -> None: ...
