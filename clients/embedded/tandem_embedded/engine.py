"""The embedded engine: the scheduler core and the model runner joined by direct calls."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scheduler_svc.core.geometry import ExecutorGeometry
from scheduler_svc.core.options import CoreOptions, OnPressure
from scheduler_svc.core.request import FinishReason, NewRequest
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.errors import RequestNotFound, TandemError
from tandem_embedded.backend import Backend, load_backend
from tandem_embedded.driver import Driver
from tandem_embedded.errors import ConfigError, ValidationError, engine_error
from tandem_embedded.ledger import Entry, Ledger
from tandem_embedded.logs import quiet_unless_configured
from tandem_embedded.params import GenerationParams
from tandem_embedded.results import (
    STATE_OF_CORE,
    CompletedRequest,
    EngineMetrics,
    MemoryStats,
    Request,
)
from tandem_embedded.tokenizer import HuggingFaceTokenizer, Tokenizer


class InferenceEngine:
    """
    Serves requests in this process.

    Any thread may submit, abort and ask; one thread at a time drives with `step` or `run`, others
    that try wait. Errors are `EngineError`s.

    Args:
        config: Limits; the defaults if not given. A default max_model_len gives way to the model.
        model_dir: Model in Hugging Face format.
        tokenizer: Instead of the model directory's tokenizer.json.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", "cuda:N" or "auto".
        num_threads: Threads that compute, of the whole process; None leaves it as it is.
        window: Steps that may be planned ahead of the result applied; 1 is none.
        collect_margins: Report by how much each token won.
        batch_invariant: Give a request the same tokens, bit for bit, whatever is computed beside it
            and however its prompt is cut; slower.
        swap_space_gb: GiB of host memory that preempted requests' KV can be swapped to.
        cpu_extension: "auto", "on" or "off": whether the CPU attends in C++, for the whole process;
            "auto" where a compiler or a library built earlier is found.
        options: How to schedule; by default as a service does, but requests that arrive at
            memory_threshold are refused.
        backend: Instead of loading `model_dir`.
        clock: Monotonic seconds.

    Raises:
        ConfigError: Limits, directory, dtype or device cannot be used; nothing was allocated then.
        EngineMemoryError: Weights or KV blocks do not fit.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        model_dir: Path | str | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        num_threads: int | None = None,
        window: int = 1,
        collect_margins: bool = False,
        batch_invariant: bool = False,
        swap_space_gb: float = 0.0,
        cpu_extension: str = "auto",
        options: CoreOptions | None = None,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        quiet_unless_configured()
        if window < 1:
            raise ConfigError(f"window must be at least 1, got {window}", reason="INVALID_CONFIG")
        config = EngineConfig() if config is None else config
        options = CoreOptions(on_pressure=OnPressure.REFUSE) if options is None else options
        directory = None if model_dir is None else Path(model_dir)
        try:
            config.validate()
            options.validate()
            if backend is None:
                if directory is None:
                    raise ConfigError("model_dir is needed", reason="INVALID_CONFIG")
                config, backend = load_backend(
                    config,
                    directory,
                    dtype=dtype,
                    device=device,
                    num_threads=num_threads,
                    collect_margins=collect_margins,
                    batch_invariant=batch_invariant,
                    swap_space_gb=swap_space_gb,
                    cpu_extension=cpu_extension,
                )
            self._core = Scheduler(config, _geometry(config, backend), options)
        except TandemError as error:
            raise engine_error(error) from error
        self.config = config
        self._backend = backend
        self._tokenizer = _tokenizer(tokenizer, directory)
        self._ledger = Ledger(self._tokenizer)
        self._clock = clock
        self._next_id = 0
        self._lock = threading.Lock()
        """Guards core, ledger and ids; never held while a step computes."""
        self._driving = threading.Lock()
        """Held by the thread that drives; guards the driver."""
        self._driver = Driver(
            self._core, backend.runner, self._ledger, self._lock, window=window, clock=clock
        )

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self._backend.vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What turns text into tokens; None without one."""
        return self._tokenizer

    def submit_request(
        self, prompt: str | Sequence[int], params: GenerationParams | None = None
    ) -> int:
        """
        Queue a request; nothing is computed yet.

        Args:
            prompt: Text, or token ids.
            params: The defaults if not given.

        Returns:
            Its id; ids grow from 0.

        Raises:
            ValidationError: Prompt or parameters are wrong, or it can never fit.
            EngineMemoryError: Too many blocks are in use, and the engine refuses then.
            SchedulerError: max_num_seqs requests are in the system.
        """
        params = GenerationParams() if params is None else params
        params.validate()
        params.check_ids(self._backend.vocab_size)
        token_ids = self._token_ids(prompt)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        with self._lock:
            now = self._clock()
            request_id = self._next_id
            eos = () if params.ignore_eos else self._backend.eos_token_ids
            new = NewRequest(
                request_id=str(request_id),
                handle=request_id,
                prompt=np.array(token_ids, np.int32),
                sampling=params.row_sampling(seed, {*eos, *params.stop_token_ids}),
                max_tokens=params.max_tokens,
                arrival_s=now,
                eos_token_ids=frozenset(eos),
                stop_token_ids=frozenset(params.stop_token_ids),
            )
            try:
                acceptance = self._core.submit(new, now)
            except TandemError as error:
                raise engine_error(error) from error
            self._next_id += 1
            self._ledger.live[request_id] = Entry(
                token_ids[acceptance.num_truncated_tokens :],
                params,
                seed,
                now,
                num_truncated=acceptance.num_truncated_tokens,
            )
        return request_id

    def step(self) -> list[CompletedRequest]:
        """Plan and compute one step; returns who completed, each request once."""
        with self._driving:
            self._driver.turn()
            # Once the last request is over, its blocks are given back at once.
            while self._only_releases_left():
                self._driver.turn()
            with self._lock:
                return self._ledger.take()

    def run(self) -> list[CompletedRequest]:
        """Step until nothing is pending; returns who completed, each request once."""
        completed = []
        while self.has_pending_work():
            completed += self.step()
        return completed

    def has_pending_work(self) -> bool:
        """True while a request is in the system or a result was not delivered."""
        with self._lock:
            return bool(self._ledger.num_undelivered) or self._core.has_pending_work()

    def abort(self, request_id: int) -> None:
        """
        End a request with CANCELLED; its output so far comes with the next step.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            try:
                self._core.end_request(str(request_id), FinishReason.CANCELLED, self._clock())
            except TandemError as error:
                raise engine_error(error) from error
            self._ledger.note(self._core.take_events())

    def preempt(self, request_id: int) -> None:
        """
        Take a running request's blocks away; it goes on later with the same tokens.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            try:
                self._core.preempt(str(request_id))
            except TandemError as error:
                raise engine_error(error) from error

    def output_tokens(self, request_id: int) -> list[int]:
        """
        Output so far of a live request.

        Raises:
            SchedulerError: No such request is live.
        """
        return self.get_request(request_id).output_tokens

    def get_request(self, request_id: int) -> Request:
        """
        A live request as it is now.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            entry, state = self._ledger.live.get(request_id), self._core.state_of(request_id)
            if entry is None or state is None:
                message = f"no live request has the id {request_id}: it may have ended already"
                raise engine_error(RequestNotFound(message))
            return Request(
                request_id=request_id,
                input_tokens=list(entry.prompt),
                output_tokens=list(entry.outputs),
                params=entry.params,
                state=STATE_OF_CORE[state],
                created_at=entry.created_at,
            )

    def get_memory_stats(self) -> MemoryStats:
        """KV blocks in use; printing it gives a line."""
        with self._lock:
            stats = self._core.stats()
        return MemoryStats(
            total=stats.total_blocks,
            used=stats.used_blocks,
            free=stats.free_blocks + stats.cached_blocks,
            num_sequences=stats.num_running - stats.num_draining,
        )

    def get_metrics(self) -> EngineMetrics:
        """Counts since the engine was made."""
        with self._lock:
            stats, num_requests = self._core.stats(), self._core.num_requests
        return EngineMetrics(
            total_requests=stats.accepted_requests,
            completed_requests=stats.finished_requests,
            failed_requests=stats.failed_requests,
            total_tokens_generated=stats.output_tokens,
            memory_utilization=stats.used_blocks / stats.total_blocks,
            active_sequences=num_requests,
            preemptions=stats.preemptions,
            steps=stats.steps,
        )

    def check_integrity(self) -> None:
        """
        Check every invariant of the scheduler core.

        Raises:
            ExecutionError: One does not hold: a bug of ours.
        """
        with self._lock:
            try:
                self._core.check_integrity()
            except TandemError as error:
                raise engine_error(error) from error

    def _only_releases_left(self) -> bool:
        with self._lock:
            return not self._core.num_requests and self._core.has_pending_work()

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValidationError("the prompt is empty.", reason="EMPTY_PROMPT", field="prompt")
            if self._tokenizer is None:
                message = "the model has no tokenizer.json: give token ids or a tokenizer."
                raise ValidationError(message, reason="INVALID_PARAMETER", field="prompt")
            prompt = self._tokenizer.encode(prompt)
        token_ids = [int(token) for token in prompt]
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                message = f"token id {token} is not in the vocabulary, 0 to {self.vocab_size - 1}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field="prompt")
        return token_ids


def _geometry(config: EngineConfig, backend: Backend) -> ExecutorGeometry:
    return ExecutorGeometry(
        num_blocks=config.max_num_blocks,
        block_size=config.block_size,
        num_slots=backend.num_slots,
        max_batch_size=config.max_batch_size,
        max_total_tokens=config.max_total_tokens,
        max_model_len=config.max_model_len,
        num_host_blocks=backend.num_host_blocks,
    )


def _tokenizer(given: Tokenizer | None, model_dir: Path | None) -> Tokenizer | None:
    """The tokenizer given, else the model directory's, else none."""
    if given is not None or model_dir is None or not (model_dir / "tokenizer.json").is_file():
        return given
    return HuggingFaceTokenizer(model_dir)
