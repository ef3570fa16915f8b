from tandem.common.v1 import profile_pb2 as _profile_pb2
from tandem.executor.v1 import batch_pb2 as _batch_pb2
from tandem.executor.v1 import result_pb2 as _result_pb2
from tandem.executor.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "boot_id", "model_fingerprint", "model_name", "architecture", "dtype", "vocab_size", "max_model_len", "block_size", "num_blocks", "num_slots", "max_batch_size", "max_total_tokens", "max_inflight_steps", "kv_bytes_per_block", "eos_token_ids", "generation_defaults", "device", "features", "heartbeat_interval_ms", "num_host_blocks", "num_parameters", "num_threads", "warnings", "num_stages")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_STEPS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    boot_id: str
    model_fingerprint: str
    model_name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_slots: int
    max_batch_size: int
    max_total_tokens: int
    max_inflight_steps: int
    kv_bytes_per_block: int
    eos_token_ids: bytes
    generation_defaults: GenerationDefaults
    device: str
    features: _containers.RepeatedScalarFieldContainer[str]
    heartbeat_interval_ms: int
    num_host_blocks: int
    num_parameters: int
    num_threads: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    num_stages: int
    def __init__(self, protocol_version: _Optional[int] = ..., boot_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., model_name: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_inflight_steps: _Optional[int] = ..., kv_bytes_per_block: _Optional[int] = ..., eos_token_ids: _Optional[bytes] = ..., generation_defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., device: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., heartbeat_interval_ms: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_parameters: _Optional[int] = ..., num_threads: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., num_stages: _Optional[int] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "repetition_penalty", "min_p", "frequency_penalty", "presence_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("name", "chunk", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    chunk: bytes
    sha256: str
    def __init__(self, name: _Optional[str] = ..., chunk: _Optional[bytes] = ..., sha256: _Optional[str] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _profile_pb2.ProfileOptions
    def __init__(self, options: _Optional[_Union[_profile_pb2.ProfileOptions, _Mapping]] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("progress", "trace")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    progress: _profile_pb2.ProfileProgress
    trace: _profile_pb2.TraceChunk
    def __init__(self, progress: _Optional[_Union[_profile_pb2.ProfileProgress, _Mapping]] = ..., trace: _Optional[_Union[_profile_pb2.TraceChunk, _Mapping]] = ...) -> None: ...
