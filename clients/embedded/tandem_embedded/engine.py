"""The embedded engine: the scheduler core and the model runner joined by direct calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from scheduler_svc.core.observe.request_events import RequestEvent
from scheduler_svc.core.request.options import CoreOptions, OnPressure
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.tenant import NO_TENANT
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.errors import RequestNotFound
from tandem_embedded.backend import Backend, load_backend
from tandem_embedded.driver import Driver
from tandem_embedded.errors import SchedulerError, engine_error, engine_errors
from tandem_embedded.intake import Intake, Messages, Prompt
from tandem_embedded.ledger import Delivery, Entry, Ledger
from tandem_embedded.logs import quiet_unless_configured
from tandem_embedded.params import GenerationParams
from tandem_embedded.results import (
    STATE_OF_CORE,
    CompletedRequest,
    EngineMetrics,
    MemoryStats,
    Request,
)
from tandem_embedded.settings import (
    check_buffer,
    check_config,
    check_options,
    kv_mode,
    model_directory,
)
from tandem_embedded.stream import TextStream
from tandem_embedded.tokenizer import HuggingFaceTokenizer, Tokenizer


class InferenceEngine:
    """
    An engine that serves requests in this process.

    Any thread may submit, abort and ask; one thread at a time drives with `step`, `run`, `complete`
    or a stream, and other threads that try to drive wait. Errors are `EngineError`s.

    Args:
        config: Limits. Default: those of a service, the model's context length and KV memory by the
            free memory. In a given config, a default max_model_len is lowered to what the model
            supports.
        model_dir: Directory of a model in Hugging Face format; default: the bundled model.
        tokenizer: Tokenizer to use instead of the model directory's tokenizer.json.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", "cuda:N" or "auto".
        num_threads: Number of compute threads of the whole process; None = unchanged.
        window: Steps planned before the first of them is applied; 1 = no lookahead.
        collect_margins: Report by how much each token won.
        batch_invariant: Give a request the same tokens, bit for bit, in any batch and with any
            chunks of its prompt; slower.
        swap_space_gb: GiB of host memory that preempted requests' KV can be swapped to.
        buffer_size_gb: GiB of KV memory, instead of the config's max_num_blocks.
        kv_cache_management_mode: Treatment of the KV cache by `suspend`: "persist" keeps it,
            "offload" moves it to the host until `resume`, "recompute" drops it.
        cpu_extension: Use of the C++ kernels on the CPU, for the whole process: "on", "off", or
            "auto", which uses them if a compiler or a library built earlier is found.
        options: Scheduling options; default: those of a service, but requests that arrive at
            memory_threshold are refused.
        backend: Backend to use instead of loading `model_dir`.
        clock: Clock in monotonic seconds.

    Raises:
        ConfigError: Limits, directory, dtype or device cannot be used; nothing was allocated.
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
        buffer_size_gb: float | None = None,
        kv_cache_management_mode: str = "persist",
        cpu_extension: str = "auto",
        options: CoreOptions | None = None,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        quiet_unless_configured()
        options = CoreOptions(on_pressure=OnPressure.REFUSE) if options is None else options
        with engine_errors():
            check_config(config)
            check_options(options, window)
            check_buffer(config, buffer_size_gb)
            self._kv_mode = kv_mode(kv_cache_management_mode)
            if backend is None:
                directory = model_directory(model_dir)
                config, backend = load_backend(
                    config,
                    directory,
                    dtype=dtype,
                    device=device,
                    num_threads=num_threads,
                    collect_margins=collect_margins,
                    batch_invariant=batch_invariant,
                    swap_space_gb=swap_space_gb,
                    buffer_size_gb=buffer_size_gb,
                    cpu_extension=cpu_extension,
                )
                if tokenizer is None and (directory / "tokenizer.json").is_file():
                    tokenizer = HuggingFaceTokenizer(directory)
            config = config or EngineConfig()
            self._core = Scheduler(config, backend.geometry(config), options)
        self.config = config
        self._backend = backend
        self._tokenizer = tokenizer
        self._intake = Intake(tokenizer, backend.vocabulary, config.max_model_len)
        self._ledger = Ledger(tokenizer)
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
        """Size of the vocabulary; token ids are in [0, vocab_size)."""
        return self._backend.vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the engine; None without one."""
        return self._tokenizer

    def submit_request(self, prompt: Prompt, params: GenerationParams | None = None) -> int:
        """
        Put a request into the waiting queue; nothing is computed yet.

        Args:
            prompt: Text, or token ids.
            params: Parameters of the request; the defaults if not given.

        Returns:
            Id of the request; ids grow from 0, by the request's number of choices.

        Raises:
            ValidationError: Prompt or parameters are wrong, or the request can never fit.
            EngineMemoryError: Too many blocks are in use, and the options say to refuse then.
            SchedulerError: max_num_seqs requests are in the system.
        """
        return self._submit(prompt, None, params, None)

    def submit_chat(self, messages: Messages, params: GenerationParams | None = None) -> int:
        """Queue the answer to a conversation, as `submit_request` does a prompt."""
        return self._submit(None, messages, params, None)

    def complete(
        self,
        prompt: Prompt | None = None,
        params: GenerationParams | None = None,
        *,
        messages: Messages | None = None,
    ) -> CompletedRequest:
        """
        Serve one request, or the answer to a conversation, and drive the engine until it is over.

        Other requests are served beside it; their results come with the next `step` or `run`.

        Raises:
            EngineError: As `submit_request`. A request that fails later is returned with its error.
        """
        with self._stream(prompt, messages, params, is_streamed=False) as stream:
            return stream.wait()

    def stream(
        self,
        prompt: Prompt | None = None,
        params: GenerationParams | None = None,
        *,
        messages: Messages | None = None,
    ) -> TextStream:
        """
        Return a stream that serves one request, or the answer to a conversation, piece by piece.

        Raises:
            EngineError: As `submit_request`, at once.
        """
        return self._stream(prompt, messages, params, is_streamed=True)

    def step(self) -> list[CompletedRequest]:
        """
        Plan and compute one step; return the requests that completed, each once.

        Raises:
            SchedulerError: The engine is suspended.
        """
        self._drive()
        with self._lock:
            return self._ledger.take()

    def run(self) -> list[CompletedRequest]:
        """Step until no work is pending; return the requests that completed, each once."""
        completed = []
        while self.has_pending_work():
            completed += self.step()
        return completed

    def has_pending_work(self) -> bool:
        """Return True while a request is in the system or a result is not delivered."""
        with self._lock:
            return bool(self._ledger.num_undelivered) or self._core.has_pending_work()

    def suspend(self) -> None:
        """
        Stop computing until `resume`, and release KV memory as `kv_cache_management_mode` says.

        New requests are accepted meanwhile and wait. Running requests go on where they stopped, or
        are computed again under "recompute", with the same tokens. A second call does nothing.

        Raises:
            EngineMemoryError: The host has no room for the KV memory; nothing is suspended.
        """
        with self._driving, engine_errors():
            if not self._core.is_suspended:
                self._driver.suspend(self._kv_mode)

    def resume(self) -> None:
        """
        End a suspension; without one it does nothing.

        Raises:
            EngineMemoryError: The memory is taken; the suspension goes on.
        """
        with self._driving, engine_errors():
            if self._core.is_suspended:
                self._driver.resume()

    @property
    def is_suspended(self) -> bool:
        """True from `suspend` to `resume`."""
        with self._lock:
            return self._core.is_suspended

    def abort(self, request_id: int) -> None:
        """
        End a request with CANCELLED; the next step returns it with its output so far.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            now = self._clock()
            with engine_errors():
                self._core.end_request(
                    str(request_id), FinishReason.CANCELLED, now, tenant=self._tenant(request_id)
                )
            self._ledger.settle(self._core, now)

    def preempt(self, request_id: int) -> None:
        """
        Preempt a running request: it loses its blocks, and continues later with the same tokens.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock, engine_errors():
            self._core.preempt(str(request_id), self._tenant(request_id))

    def output_tokens(self, request_id: int, choice: int = 0) -> list[int]:
        """
        Return the output so far of one choice of a live request.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            return list(self._entry(request_id).choices[choice].tokens)

    def get_request(self, request_id: int) -> Request:
        """
        Return a snapshot of a live request, in the state of its first choice that is not over.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock:
            entry = self._entry(request_id)
            states = [self._core.state_of(handle) for handle in entry.handles]
            return Request(
                request_id=request_id,
                input_tokens=list(entry.prompt),
                output_tokens=list(entry.choices[0].tokens),
                params=entry.params,
                state=next(STATE_OF_CORE[state] for state in states if state is not None),
                created_at=entry.created_at,
            )

    def request_events(self, request_id: int) -> list[RequestEvent]:
        """
        Return the events of a request, live or over lately, in order of time.

        Raises:
            ConfigError: None of the options `track_*_events` is on.
            SchedulerError: No events of this request are kept.
        """
        with self._lock, engine_errors():
            return self._core.request_events(str(request_id))

    def get_memory_stats(self) -> MemoryStats:
        """Return the numbers of KV blocks; `str()` of the result is one line."""
        with self._lock:
            return MemoryStats.of(self._core.stats(), self._core.num_slots_in_use)

    def get_metrics(self) -> EngineMetrics:
        """Return the counts since the engine was created."""
        with self._lock:
            stats, num_requests = self._core.stats(), self._core.num_requests
        return EngineMetrics.of(stats, num_requests)

    def check_integrity(self) -> None:
        """
        Check every invariant of the scheduler core.

        Raises:
            ExecutionError: An invariant does not hold, which is a bug of ours.
        """
        with self._lock, engine_errors():
            self._core.check_integrity()

    def _submit(
        self,
        prompt: Prompt | None,
        messages: Messages | None,
        params: GenerationParams | None,
        delivery: Delivery | None,
    ) -> int:
        params = GenerationParams() if params is None else params
        entry = self._intake.prepare(prompt, messages, params, delivery)
        with self._lock:
            entry.request_id, entry.created_at = self._next_id, self._clock()
            with engine_errors():
                acceptance = self._core.submit(self._intake.new_request(entry), entry.created_at)
            self._next_id += params.n
            entry.num_truncated = acceptance.num_truncated_tokens
            del entry.prompt[: entry.num_truncated]
            self._ledger.add(entry)
        return entry.request_id

    def _stream(
        self,
        prompt: Prompt | None,
        messages: Messages | None,
        params: GenerationParams | None,
        *,
        is_streamed: bool,
    ) -> TextStream:
        delivery = Delivery(is_streamed)
        request_id = self._submit(prompt, messages, params, delivery)
        return TextStream(request_id, delivery, drive=self._drive, abort=self.abort)

    def _drive(self) -> None:
        """Compute one step, and the steps that release blocks if no request is left after it."""
        with self._driving:
            if self._core.is_suspended and not self._ledger.num_undelivered:
                message = "the engine is suspended: call resume() first"
                raise SchedulerError(message, reason="NO_EXECUTOR")
            self._driver.turn()
            while self._only_releases_left():
                self._driver.turn()

    def _only_releases_left(self) -> bool:
        with self._lock:
            return not self._core.num_requests and self._core.has_pending_work()

    def _tenant(self, request_id: int) -> str:
        """Return the tenant of a request; that of requests without one if it is not live."""
        entry = self._ledger.entries.get(request_id)
        return NO_TENANT if entry is None else entry.params.tenant

    def _entry(self, request_id: int) -> Entry:
        entry = self._ledger.entries.get(request_id)
        if entry is None:
            message = f"no live request has the id {request_id}: it may have ended already"
            raise engine_error(RequestNotFound(message))
        return entry
