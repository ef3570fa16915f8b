"""Scheduler and executor driven by hand, and an engine on an executor that is not ours."""

from __future__ import annotations

import pytest

from tandem_embedded import (
    ConfigError,
    EngineConfig,
    EngineMemoryError,
    ExecutionBatch,
    ExecutionError,
    ExecutionOutput,
    GenerationParams,
    InferenceEngine,
    ModelExecutor,
    Request,
    Scheduler,
    SchedulerError,
    ValidationError,
    executor_backend,
)
from tests.model_zoo import llama_mha
from tests.scheduler_svc.core.fake_executor import expected_outputs, next_token
from tests.scheduler_svc.core.kv_memory import fold

CONFIG = EngineConfig(
    block_size=4, max_num_blocks=40, max_batch_size=4, max_model_len=64, max_total_tokens=16
)
PROMPTS = [[5, 6, 7], [5, 6, 7] * 9, [9] * 13]


class PlainExecutor:
    """
    A `GPUExecutorTrait` with a KV cache of what was written; tokens follow from the prefix.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._block_size = config.block_size
        self._written: dict[tuple[int, int], int] = {}
        self.captured: list[int] = []
        self.silent: set[int] = set()
        """Sequences that get no token."""

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        for source, destination in batch.copies:
            for offset in range(self._block_size):
                if (source, offset) in self._written:
                    self._written[destination, offset] = self._written[source, offset]
        at, told, tokens = 0, [], []
        for row, seq_id in enumerate(batch.seq_ids):
            length, table = batch.seq_lens[row], batch.block_tables[row]
            for index in range(at, at + length):
                block, offset = divmod(batch.positions[index], self._block_size)
                self._written[table[block], offset] = batch.input_tokens[index]
            at += length
            known = [
                self._written[table[i // self._block_size], i % self._block_size]
                for i in range(batch.context_lens[row])
            ]
            if seq_id not in self.silent:
                told.append(seq_id)
                tokens.append(self._next(known) if batch.samples[row] else None)
        return ExecutionOutput(seq_ids=told, next_tokens=tokens)

    def capture_decode_graph(self, batch_size: int) -> None:
        self.captured.append(batch_size)

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        return self.execute(batch)

    def _next(self, known: list[int]) -> int:
        fingerprint = 0
        for token in known:
            fingerprint = fold(fingerprint, token)
        return next_token(fingerprint, 50)


def drive(scheduler: Scheduler, executor) -> dict[int, list[int]]:
    """Step until nothing is pending; outputs by request."""
    completed = []
    while scheduler.has_pending_work():
        plan = scheduler.schedule()
        scheduler.update_sequences(executor.execute(plan.batch))
        scheduler.check_integrity()
        completed += scheduler.get_completed()
    assert all(request.success for request in completed)
    return {request.request_id: request.output_tokens for request in completed}


def request_of(number: int, prompt: list[int], max_tokens: int = 8, **params) -> Request:
    return Request(
        request_id=number,
        input_tokens=prompt,
        params=GenerationParams(max_tokens=max_tokens, **params),
    )


class TestByHand:
    def test_requests_get_their_tokens(self):
        """
        Scheduled, executed and updated step by step, every request has the tokens of its prompt.
        """
        scheduler, executor = Scheduler(CONFIG), PlainExecutor(CONFIG)
        for number, prompt in enumerate(PROMPTS):
            assert number == scheduler.add_request(request_of(number, prompt))
        found = drive(scheduler, executor)
        assert {
            number: expected_outputs(prompt, 8) for number, prompt in enumerate(PROMPTS)
        } == found
        assert 0 == scheduler.get_memory_stats().used_blocks
        assert [] == scheduler.get_completed()

    def test_a_plan_says_what_is_computed(self):
        """
        A sequence's computed tokens, blocks and state follow its prefill and its decodes, and
        decodes stand first.
        """
        scheduler, executor = Scheduler(CONFIG), PlainExecutor(CONFIG)
        scheduler.add_request(request_of(3, [5] * 6))
        first = scheduler.schedule()
        (sequence,) = first.prefill_sequences
        assert (3, 0, 0, 6, 2) == (
            sequence.seq_id,
            sequence.num_computed_tokens,
            sequence.num_generated_tokens,
            first.total_tokens,
            len(sequence.get_block_table()),
        )
        assert [5] * 6 == first.batch.input_tokens
        assert [0, 1, 2, 3, 4, 5] == first.batch.positions
        output = executor.execute(first.batch)
        scheduler.update_sequences(output)
        scheduler.add_request(request_of(4, [6] * 20))
        second = scheduler.schedule()
        (decoding,), (starting,) = second.decode_sequences, second.prefill_sequences
        assert (6, 1, 7) == (
            decoding.num_computed_tokens,
            decoding.num_generated_tokens,
            decoding.context_len,
        )
        assert [3, 4] == second.batch.seq_ids
        assert [False, True] == second.batch.is_prefill
        assert [True, False] == second.batch.samples, "16 tokens do not hold the whole prompt"
        assert output.next_tokens == second.batch.input_tokens[:1]
        assert 0 == starting.num_computed_tokens

    def test_a_sequence_without_a_token_fails_alone(self):
        """
        A sequence that the executor leaves out fails; the others go on.
        """
        scheduler, executor = Scheduler(CONFIG), PlainExecutor(CONFIG)
        executor.silent.add(1)
        for number in range(3):
            scheduler.add_request(request_of(number, [5, number]))
        completed = []
        while scheduler.has_pending_work():
            scheduler.update_sequences(executor.execute(scheduler.schedule().batch))
            completed += scheduler.get_completed()
        failed = [request for request in completed if not request.success]
        assert [1] == [request.request_id for request in failed]
        assert isinstance(failed[0].error, ExecutionError)
        assert 3 == len(completed)

    def test_steps_are_taken_one_after_another(self):
        """
        A second plan without the first one's output is refused, and so is an output of other
        sequences.
        """
        scheduler = Scheduler(CONFIG)
        scheduler.add_request(request_of(0, [5]))
        scheduler.schedule()
        with pytest.raises(SchedulerError, match="call update_sequences"):
            scheduler.schedule()
        with pytest.raises(SchedulerError, match=r"sequences \[8\] have no part"):
            scheduler.update_sequences(ExecutionOutput(seq_ids=[8], next_tokens=[1]))

    def test_a_request_that_cannot_be_taken_is_refused(self):
        """
        A request with a taken id, several choices or too long a prompt is refused.
        """
        scheduler = Scheduler(CONFIG)
        scheduler.add_request(request_of(0, [5]))
        with pytest.raises(SchedulerError):
            scheduler.add_request(request_of(0, [5]))
        with pytest.raises(ValidationError, match="n must be 1"):
            scheduler.add_request(request_of(1, [5], n=2))
        with pytest.raises(ValidationError, match="max_model_len is 64"):
            scheduler.add_request(request_of(1, [5] * 70))

    def test_pressure_refuses(self):
        """
        At memory_threshold a request is refused with a memory error.
        """
        config = EngineConfig(
            block_size=4, max_num_blocks=10, max_model_len=40, memory_threshold=0.5
        )
        scheduler, executor = Scheduler(config), PlainExecutor(config)
        scheduler.add_request(request_of(0, [5] * 20))
        scheduler.update_sequences(executor.execute(scheduler.schedule().batch))
        with pytest.raises(EngineMemoryError):
            scheduler.add_request(request_of(1, [5]))

    def test_a_scheduler_starts_over_with_an_executor_that_lost_everything(self):
        """
        After `reset` what was computed is computed again, with the same tokens.
        """
        scheduler = Scheduler(CONFIG)
        scheduler.add_request(request_of(0, PROMPTS[1]))
        executor = PlainExecutor(CONFIG)
        for _ in range(4):
            scheduler.update_sequences(executor.execute(scheduler.schedule().batch))
        scheduler.schedule()
        scheduler.reset()
        found = drive(scheduler, PlainExecutor(CONFIG))
        assert {0: expected_outputs(PROMPTS[1], 8)} == found

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"seq_ids": [1]}, "seq_lens has 0 entries, it must have 1"),
            ({"input_tokens": [1]}, "input_tokens has 1 entries, it must have 0"),
        ],
    )
    def test_a_batch_with_lengths_that_contradict_is_refused(self, values, text):
        """
        A batch needs one entry per sequence, and as many tokens and positions as the lengths add up
        to.
        """
        with pytest.raises(ValidationError, match=text):
            ExecutionBatch(**values)


class TestModelExecutor:
    @pytest.mark.slow
    def test_tokens_are_those_of_an_engine(self, tmp_path):
        """
        Scheduler and model executor, driven by hand, produce what an engine does.
        """
        model_dir = llama_mha(tmp_path / "model")
        config = EngineConfig(
            block_size=8, max_num_blocks=64, max_model_len=128, max_total_tokens=32
        )
        executor = ModelExecutor.load(config, model_dir, dtype="float32")
        scheduler = Scheduler(executor.config, vocab_size=executor.backend.vocab_size)
        params = {"temperature": 0.8, "top_p": 1.0, "seed": 3, "ignore_eos": True}
        for number, prompt in enumerate(PROMPTS):
            scheduler.add_request(request_of(number, prompt, 20, **params))
        engine = InferenceEngine(config, model_dir, dtype="float32")
        wanted = {
            number: engine.complete(prompt, GenerationParams(max_tokens=20, **params)).output_tokens
            for number, prompt in enumerate(PROMPTS)
        }
        assert wanted == drive(scheduler, executor)

    def test_a_batch_made_by_hand_is_refused(self, tmp_path):
        """
        The model executor computes what a scheduler planned.
        """
        executor = ModelExecutor.load(
            EngineConfig(max_num_blocks=8), llama_mha(tmp_path / "model"), dtype="float32"
        )
        sampling = GenerationParams().row_sampling(1, ())
        batch = ExecutionBatch(
            seq_ids=[1], input_tokens=[5], positions=[0], seq_lens=[1], context_lens=[1],
            block_tables=[[1]], is_prefill=[True], samples=[True], sampling=[sampling],
        )  # fmt: skip
        with pytest.raises(ValidationError, match=r"Scheduler\.schedule\(\) planned"):
            executor.execute(batch)
        with pytest.raises(
            ExecutionError, match=r"^Execution error: No CUDA graph captured$"
        ) as error:
            executor.execute_graph(ExecutionBatch())
        assert ("INVALID_PARAMETER", "batch") == (error.value.reason, error.value.field)


class TestOwnExecutor:
    def test_an_engine_runs_on_anybodys_executor(self):
        """
        Prompts in chunks, shared prefixes and decodes: an engine over a trait's executor serves
        what the executor's function of the prefix says.
        """
        backend = executor_backend(PlainExecutor(CONFIG), CONFIG, vocab_size=50)
        engine = InferenceEngine(CONFIG, backend=backend)
        for prompt in PROMPTS:
            engine.submit_request(prompt, GenerationParams(max_tokens=8))
        completed = sorted(engine.run(), key=lambda request: request.request_id)
        assert [expected_outputs(prompt, 8) for prompt in PROMPTS] == [
            request.output_tokens for request in completed
        ]
        again = engine.complete(PROMPTS[1], GenerationParams(max_tokens=8))
        assert expected_outputs(PROMPTS[1], 8) == again.output_tokens
        assert 0 < again.num_cached_tokens
        engine.check_integrity()

    def test_a_graph_that_the_backend_cannot_capture_is_refused(self):
        """
        Graphs are a matter of our own runner; another backend refuses them by name.
        """
        backend = executor_backend(PlainExecutor(CONFIG), CONFIG, vocab_size=50)
        executor = ModelExecutor(CONFIG, backend)
        with pytest.raises(ConfigError, match="captures no graphs: call execute instead"):
            executor.capture_decode_graph(1)
        with pytest.raises(ConfigError, match="captures no graphs"):
            executor.execute_graph(ExecutionBatch())

    def test_an_executor_that_fails_is_tried_again(self):
        """
        An error that it raises costs a step, and three in a row the requests.
        """
        executor = PlainExecutor(CONFIG)
        engine = InferenceEngine(CONFIG, backend=executor_backend(executor, CONFIG, vocab_size=50))
        failures = [ExecutionError("kernel"), ExecutionError("kernel")]
        works = executor.execute

        def execute(batch):
            if failures:
                raise failures.pop()
            return works(batch)

        executor.execute = execute
        assert (
            expected_outputs([5], 8)
            == engine.complete([5], GenerationParams(max_tokens=8)).output_tokens
        )
        failures += [ExecutionError("kernel is gone")] * 3
        assert "kernel is gone" in str(engine.complete([5]).error)
