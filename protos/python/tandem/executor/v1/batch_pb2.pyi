from tandem.executor.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_MODE_UNSPECIFIED: _ClassVar[KvMode]
    KV_MODE_PERSIST: _ClassVar[KvMode]
    KV_MODE_OFFLOAD: _ClassVar[KvMode]
    KV_MODE_RECOMPUTE: _ClassVar[KvMode]
KV_MODE_UNSPECIFIED: KvMode
KV_MODE_PERSIST: KvMode
KV_MODE_OFFLOAD: KvMode
KV_MODE_RECOMPUTE: KvMode

class ExecuteRequest(_message.Message):
    __slots__ = ("attach", "step", "crc32")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    attach: _session_pb2.Attach
    step: Step
    crc32: int
    def __init__(self, attach: _Optional[_Union[_session_pb2.Attach, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., crc32: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("session_epoch", "step_id", "acked_step_id", "state_hash", "batch", "suspend", "resume")
    SESSION_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ACKED_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SUSPEND_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    session_epoch: int
    step_id: int
    acked_step_id: int
    state_hash: int
    batch: ExecutionBatch
    suspend: Suspend
    resume: Resume
    def __init__(self, session_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., acked_step_id: _Optional[int] = ..., state_hash: _Optional[int] = ..., batch: _Optional[_Union[ExecutionBatch, _Mapping]] = ..., suspend: _Optional[_Union[Suspend, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class Suspend(_message.Message):
    __slots__ = ("kv_mode",)
    KV_MODE_FIELD_NUMBER: _ClassVar[int]
    kv_mode: KvMode
    def __init__(self, kv_mode: _Optional[_Union[KvMode, str]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExecutionBatch(_message.Message):
    __slots__ = ("admit", "row_slot", "row_num_tokens", "row_start", "row_flags", "append_slot", "append_block", "release_slot", "copy_source", "copy_destination", "swap_out_block", "swap_out_host", "swap_in_host", "swap_in_block")
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    ROW_SLOT_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_FLAGS_FIELD_NUMBER: _ClassVar[int]
    APPEND_SLOT_FIELD_NUMBER: _ClassVar[int]
    APPEND_BLOCK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SLOT_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    COPY_DESTINATION_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_HOST_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_HOST_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_BLOCK_FIELD_NUMBER: _ClassVar[int]
    admit: _containers.RepeatedCompositeFieldContainer[AdmittedRow]
    row_slot: bytes
    row_num_tokens: bytes
    row_start: bytes
    row_flags: bytes
    append_slot: bytes
    append_block: bytes
    release_slot: bytes
    copy_source: bytes
    copy_destination: bytes
    swap_out_block: bytes
    swap_out_host: bytes
    swap_in_host: bytes
    swap_in_block: bytes
    def __init__(self, admit: _Optional[_Iterable[_Union[AdmittedRow, _Mapping]]] = ..., row_slot: _Optional[bytes] = ..., row_num_tokens: _Optional[bytes] = ..., row_start: _Optional[bytes] = ..., row_flags: _Optional[bytes] = ..., append_slot: _Optional[bytes] = ..., append_block: _Optional[bytes] = ..., release_slot: _Optional[bytes] = ..., copy_source: _Optional[bytes] = ..., copy_destination: _Optional[bytes] = ..., swap_out_block: _Optional[bytes] = ..., swap_out_host: _Optional[bytes] = ..., swap_in_host: _Optional[bytes] = ..., swap_in_block: _Optional[bytes] = ...) -> None: ...

class AdmittedRow(_message.Message):
    __slots__ = ("slot", "generation", "token_ids", "num_prompt_tokens", "num_cached_tokens", "block_ids", "sampling")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    token_ids: bytes
    num_prompt_tokens: int
    num_cached_tokens: int
    block_ids: bytes
    sampling: RowSampling
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[RowSampling, _Mapping]] = ...) -> None: ...

class RowSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "choice", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_p", "min_tokens", "end_ids", "bias_ids", "bias", "logprobs", "prompt_logprobs", "allowed_ids", "logprob_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    min_p: float
    min_tokens: int
    end_ids: bytes
    bias_ids: bytes
    bias: bytes
    logprobs: int
    prompt_logprobs: int
    allowed_ids: bytes
    logprob_ids: bytes
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., min_p: _Optional[float] = ..., min_tokens: _Optional[int] = ..., end_ids: _Optional[bytes] = ..., bias_ids: _Optional[bytes] = ..., bias: _Optional[bytes] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., allowed_ids: _Optional[bytes] = ..., logprob_ids: _Optional[bytes] = ...) -> None: ...
