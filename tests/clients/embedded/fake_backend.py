"""A backend without a model: tokens are a pure function of the prefix."""

from __future__ import annotations

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem.link.batch import Batch
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.results import StepResult
from tandem_embedded import Backend, InferenceEngine, SimpleTokenizer
from tests.scheduler_svc.core.fake_executor import FakeExecutor, expected_outputs

VOCAB_SIZE = SimpleTokenizer.vocab_size


class ScriptedExecutor(FakeExecutor):
    """Executor that draws the tokens of a script, if there is one, for every request."""

    def __init__(self, geometry: ExecutorGeometry, vocab_size: int, script: list[int]) -> None:
        super().__init__(geometry, vocab_size)
        self.script = script
        self._prompt_len: dict[int, int] = {}

    def _admit(self, admission, salt: bytes) -> None:
        self._prompt_len[admission.slot] = admission.num_prompt_tokens
        super()._admit(admission, salt)

    def _sample(self, slot: int) -> int:
        at = len(self.holders[slot].prefixes) - self._prompt_len[slot]
        return self.script[at] if at < len(self.script) else super()._sample(slot)


class FakeRunner:
    """
    The core's fake executor as a runner; each error in `fail_next` is raised by one step, and every
    step that does not pass `fits` runs out of memory.
    """

    def __init__(self, geometry: ExecutorGeometry) -> None:
        self._geometry = geometry
        self.executor = ScriptedExecutor(geometry, VOCAB_SIZE, [])
        self.fail_next: list[Exception] = []
        self.fits = lambda batch: True
        self.row_counts: list[int] = []
        """Rows of each step that was computed."""
        self.num_resets = 0

    def script(self, tokens: list[int]) -> None:
        """Every request produces these tokens first."""
        self.executor.script[:] = tokens

    @property
    def state_hash(self) -> int:
        return self.executor.slots.state_hash

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        if self.fail_next:
            raise self.fail_next.pop(0)
        if not self.fits(batch):
            raise OutOfMemory(f"no memory for {len(batch.row_slot)} rows")
        self.row_counts.append(len(batch.row_slot))
        if self.executor.is_suspended and not batch.num_tokens:
            return self.executor._result([], [])
        return self.executor.execute(batch)

    def suspend(self, mode: KvMode) -> None:
        self.executor.obey(Suspend(kv_mode=mode))

    def resume(self) -> None:
        self.executor.obey(Resume())

    def reset(self) -> None:
        self.num_resets += 1
        self.executor = ScriptedExecutor(self._geometry, VOCAB_SIZE, self.executor.script)


def engine_and_runner(
    config: EngineConfig | None = None, *, eos_token_ids=(), **settings
) -> tuple[InferenceEngine, FakeRunner]:
    """An engine over a fake runner, with the byte-level tokenizer."""
    config = config or EngineConfig(
        block_size=4, max_num_blocks=64, max_batch_size=4, max_model_len=128, max_total_tokens=32
    )
    geometry = ExecutorGeometry(
        num_blocks=config.max_num_blocks,
        block_size=config.block_size,
        num_slots=config.max_batch_size,
        max_batch_size=config.max_batch_size,
        max_total_tokens=config.max_total_tokens,
        max_model_len=config.max_model_len,
    )
    runner = FakeRunner(geometry)
    backend = Backend(
        runner=runner,
        num_slots=config.max_batch_size,
        max_positions=config.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
    )
    settings = {"tokenizer": SimpleTokenizer()} | settings
    return InferenceEngine(config, backend=backend, **settings), runner


def expected(prompt: str | list[int], max_tokens: int, ends=frozenset()) -> list[int]:
    """Return the tokens that a request must produce."""
    ids = SimpleTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    return expected_outputs(ids, max_tokens, ends, VOCAB_SIZE)
