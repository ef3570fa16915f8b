"""The embedded engine: the scheduler core and model runners joined by direct calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem_embedded.backend import Backend
from tandem_embedded.driver import Driver
from tandem_embedded.errors import SchedulerError, engine_errors
from tandem_embedded.intake import Intake, Messages, Prompt
from tandem_embedded.ledger import Delivery, Ledger
from tandem_embedded.loading.runners import RunnerSettings, load_backends
from tandem_embedded.metadata import RequestMetadata, metadata_of
from tandem_embedded.observe.logs import quiet_unless_configured
from tandem_embedded.observe.step_reports import StepReports
from tandem_embedded.parallel.accord import Meeting, accord_of
from tandem_embedded.parallel.devices import with_runners_of
from tandem_embedded.parallel.groups import process_groups
from tandem_embedded.parallel.sizes import SizeAliases, parallel_sizes
from tandem_embedded.params import GenerationParams
from tandem_embedded.queries import EngineQueries
from tandem_embedded.results import CompletedRequest
from tandem_embedded.settings import checked_settings, kv_mode, model_directory
from tandem_embedded.stream import TextStream
from tandem_embedded.tokenizer import Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from executor_svc.slots.logits_hook import HookFunction


class InferenceEngine(EngineQueries):
    """
    An engine that serves requests in this process.

    Any thread may submit, abort and ask; one thread at a time drives with `step`, `run`, `complete`
    or a stream, and other threads that try to drive wait. Errors are `EngineError`s. Where several
    processes share the model, every rank makes the same engine and, on one thread, the same calls
    but for questions; all get the same results. `with` closes the engine at its end.

    Args:
        config: Limits of each runner. Default: those of a service, the model's context length and
            KV memory by the free memory. In a given config, a default max_model_len is lowered to
            what the model supports.
        model_dir: Directory of a model in Hugging Face format; default: the bundled model.
        tokenizer: Tokenizer to use instead of the model directory's tokenizer.json.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", "cuda:N" or "auto"; a list names the device of each runner. On "cuda"
            runners take the visible GPUs in turn, and a rank its current one.
        num_threads: Number of compute threads of the whole process; None = unchanged. Runners on
            the CPU divide them.
        window: Steps planned before the first of them is applied, 1 to 16; 1 = no lookahead. With
            several stages so many for each, of requests that take turns.
        collect_margins: Report by how much each token won.
        batch_invariant: Give a request the same tokens, bit for bit, in any batch and with any
            chunks of its prompt; slower.
        swap_space_gb: GiB of host memory that preempted requests' KV can be swapped to, each
            runner's.
        buffer_size_gb: GiB of KV memory of each runner, instead of the config's max_num_blocks.
        kv_cache_management_mode: Treatment of the KV cache by `suspend`: "persist" keeps it,
            "offload" moves it to the host until `resume`, "recompute" drops it.
        cpu_extension: Use of the C++ kernels on the CPU, for the whole process: "on", "off", or
            "auto", which uses them if a compiler or a library built earlier is found.
        options: Scheduling options; default: those of a service, but requests that arrive at
            memory_threshold are refused.
        backend: Backend to use instead of loading `model_dir`; a list has one for each runner.
        data_parallel_size: Number of runners that compute side by side in this process, each with
            all of the model and KV memory of its own.
        tensor_model_parallel_size: Number of processes of torch.distributed that hold a share of
            every layer each; default: the size of `pg_collection`, or 1 without it.
        pipeline_model_parallel_size: Number of stages that have some of the layers each, of
            tensor_model_parallel_size processes; default: those of `pg_collection`, or 1.
        pg_collection: Processes that share the model: `ProcessGroups`, or an object with Megatron's
            `tp` and `pp`; None with a size of several processes takes the world.
        metrics_writer: Gets the load of every N-th step: `wandb`, one of its runs, or TensorBoard's
            SummaryWriter; see observe/metrics_writer.py.
        logging_step_interval: This N, which also logs a line on each such step; 0 = none.
        logits_hook: Function of the logits of a step and their `DrawnRows`, called before tokens
            are drawn from them; see executor_svc/slots/logits_hook.py.
        request_metadata_types: Numbers of each request that it reads: tuples of label, dtype, and
            True for the device; default: `DEFAULT_METADATA_TYPES`. Requests set those that are none
            of their parameters in `GenerationParams.metadata`.
        clock: Clock in monotonic seconds.
        aliases: Other names of the sizes: see `SizeAliases`.

    Raises:
        ConfigError: Limits, directory, dtype, device or sizes cannot be used; nothing was
            allocated.
        EngineMemoryError: Weights or KV blocks do not fit.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        model_dir: Path | str | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        dtype: str = "auto",
        device: str | Sequence[str] = "cpu",
        num_threads: int | None = None,
        window: int = 1,
        collect_margins: bool = False,
        batch_invariant: bool = False,
        swap_space_gb: float = 0.0,
        buffer_size_gb: float | None = None,
        kv_cache_management_mode: str = "persist",
        cpu_extension: str = "auto",
        options: CoreOptions | None = None,
        backend: Backend | Sequence[Backend] | None = None,
        data_parallel_size: int | None = None,
        tensor_model_parallel_size: int | None = None,
        pipeline_model_parallel_size: int | None = None,
        pg_collection: object = None,
        metrics_writer: object = None,
        logging_step_interval: int = 0,
        logits_hook: HookFunction | None = None,
        request_metadata_types: Sequence[tuple[str, object, bool]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **aliases: Unpack[SizeAliases],
    ) -> None:
        quiet_unless_configured()
        sizes = (data_parallel_size, tensor_model_parallel_size, pipeline_model_parallel_size)
        with engine_errors():
            options = checked_settings(config, options, window, buffer_size_gb)
            self._reports = StepReports(metrics_writer, logging_step_interval)
            metadata = metadata_of(logits_hook, request_metadata_types, has_backend=bool(backend))
            settings = RunnerSettings(
                dtype=dtype,
                device=device,
                num_threads=num_threads,
                collect_margins=collect_margins,
                batch_invariant=batch_invariant,
                swap_space_gb=swap_space_gb,
                buffer_size_gb=buffer_size_gb,
                cpu_extension=cpu_extension,
                metadata=metadata,
            )
            self._kv_mode = kv_mode(kv_cache_management_mode)
            plan = parallel_sizes(sizes, aliases, type(self))
            backends = [backend] if isinstance(backend, Backend) else list(backend or ())
            plan = with_runners_of(plan, device, backends)
            groups = process_groups(plan, pg_collection)
            self._accord = accord_of(clock, groups, is_own=pg_collection is None)
            if not backends:
                directory, count = model_directory(model_dir), plan.num_runners
                common = (options, self._kv_mode)
                config, backends = load_backends(
                    config, directory, settings, num_runners=count, groups=groups, arguments=common
                )
                tokenizer = tokenizer or tokenizer_of(directory)
            self._start(config or EngineConfig(), backends, options, tokenizer, metadata)

    def _start(
        self,
        config: EngineConfig,
        backends: list[Backend],
        options: CoreOptions,
        tokenizer: Tokenizer | None,
        metadata: RequestMetadata,
    ) -> None:
        self.config = config
        self._backends = backends
        self._vocab_size = backends[0].vocab_size
        self._tokenizer = tokenizer
        self._intake = Intake(tokenizer, backends[0].vocabulary, config.max_model_len, metadata)
        self._core = Scheduler(config, backends[0].geometry(config), options)
        self._ledger = Ledger(tokenizer)
        self._next_id = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._driving = threading.Lock()
        """Held by the thread that drives; guards the driver."""
        shared = (self._core, config, backends, self._ledger, self._lock)
        self._driver = Driver(*shared, accord=self._accord, reports=self._reports)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """
        Let go of the runners, with their memory, threads and process groups.

        Nothing can be computed or submitted after it. A second call does nothing. An engine that
        nothing refers to any more lets go of them too.
        """
        with self._driving:
            self._is_closed = True
            self._backends = []
            self._driver.close()

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
        Plan and compute one step, or with several runners until the first of them is done with one;
        return the requests that completed, each once. Of a model with several stages results come
        some steps later, when they are due.

        Raises:
            SchedulerError: The engine is closed, or suspended with no completed request to return.
            ExecutionError: A step failed on a rank of several, which ends the engine; or a step met
                a bug of Tandem, after which it is computed again.
            Exception: Any other error of a runner that no step should raise, such as a ValueError,
                as it is; the step is computed again, unless there are several ranks.
        """
        if not self._only_delivers():
            self._drive()
        return self._take()

    def run(self) -> list[CompletedRequest]:
        """
        Step until no work is pending; return the requests that completed, each once.

        Raises:
            SchedulerError: The engine is suspended or closed, and work is pending.
            Exception: As `step`. What completed is returned by the next call that does not raise;
                while the engine is suspended, that is a `step`.
        """
        while self._has_work():
            self._drive()
        return self._take()

    def suspend(self) -> None:
        """
        Stop computing until `resume`, and release KV memory as `kv_cache_management_mode` says.

        New requests are accepted meanwhile and wait. Running requests go on where they stopped, or
        are computed again under "recompute", with the same tokens. A second call does nothing, but
        for runners that a `resume` brought back before it failed.

        Raises:
            EngineMemoryError: The host has no room for the KV memory. Nothing is suspended then
                that was not; of several runners, one whose memory is taken by now stays so until
                `resume`.
        """
        with self._driving, engine_errors():
            self._check_open()
            self._accord.meet(Meeting.SUSPEND)
            self._driver.suspend(self._kv_mode)

    def resume(self) -> None:
        """
        End a suspension; without one it does nothing.

        Raises:
            EngineMemoryError: The memory is taken; the suspension goes on.
        """
        with self._driving, engine_errors():
            self._check_open()
            self._accord.meet(Meeting.RESUME)
            self._driver.resume()

    def abort(self, request_id: int) -> None:
        """
        End a request with CANCELLED; the next step returns it with its output so far.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock, engine_errors():
            self._accord.meet(Meeting.ABORT, request_id)
            now, tenant = self._accord.now(), self._tenant(request_id)
            self._ledger.settle(self._core, now)
            self._core.end_request(str(request_id), FinishReason.CANCELLED, now, tenant=tenant)
            self._ledger.settle(self._core, now)
        self._driver.wake()

    def preempt(self, request_id: int) -> None:
        """
        Preempt a running request: it loses its blocks, and continues later with the same tokens.

        Raises:
            SchedulerError: No such request is live.
        """
        with self._lock, engine_errors():
            self._accord.meet(Meeting.PREEMPT, request_id)
            self._core.preempt(str(request_id), self._tenant(request_id))
        self._driver.wake()

    def _submit(
        self,
        prompt: Prompt | None,
        messages: Messages | None,
        params: GenerationParams | None,
        delivery: Delivery | None,
    ) -> int:
        params = GenerationParams() if params is None else params
        self._check_open()
        entry = self._intake.prepare(prompt, messages, params, delivery)
        with self._lock, engine_errors():
            facts = (entry.prompt, entry.params)
            entry.seed = self._accord.meet(Meeting.SUBMIT, facts, entry.seed)
            entry.request_id, entry.created_at = self._next_id, self._accord.now()
            acceptance = self._core.submit(self._intake.new_request(entry), entry.created_at)
            self._next_id += params.n
            entry.num_truncated = acceptance.num_truncated_tokens
            del entry.prompt[: entry.num_truncated]
            self._ledger.add(entry)
        self._driver.wake()
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
        with self._driving, engine_errors():
            self._check_open()
            if self._driver.is_suspended:
                message = "the engine is suspended: call resume() first"
                raise SchedulerError(message, reason="NO_EXECUTOR")
            self._driver.turn()
            while self._only_releases_left():
                self._driver.turn()

    def _take(self) -> list[CompletedRequest]:
        with self._lock:
            return self._ledger.take()
