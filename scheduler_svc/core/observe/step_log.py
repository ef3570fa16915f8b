"""
The log lines that operators of SGLang and vLLM know, from the numbers of one step.

Their wording is that of SGLang and vLLM, so that programs which parse those logs can parse these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scheduler_svc.core.request.events import LogLine

DECODE_LINE_INTERVAL = 40
"""Number of steps with decodes from one decode line to the next."""
PREEMPTION_LINE_INTERVAL = 50
"""Number of preemptions for want of blocks from one warning to the next, after the first."""

NO_IDS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSnapshot:
    """
    Numbers of the core after one step was planned.

    Attributes:
        num_running: Requests that run and are not paused.
        num_queued: Requests in the waiting queue.
        used_blocks: KV blocks that requests hold, without blocks that are only cached.
        num_blocks: All KV blocks.
        block_size: Tokens per block.
    """

    num_running: int
    num_queued: int
    used_blocks: int
    num_blocks: int
    block_size: int


def memory_text(used_blocks: int, num_blocks: int) -> str:
    """Return the well-known wording of how many KV blocks are in use."""
    share = 100 * used_blocks / num_blocks
    return f"Memory usage: {used_blocks}/{num_blocks} blocks ({share:.1f}%)"


def memory_line(used_blocks: int, num_blocks: int) -> LogLine:
    """Return the line on the KV blocks in use; cached ones do not count."""
    values = {"used_blocks": used_blocks, "total_blocks": num_blocks}
    text = memory_text(used_blocks, num_blocks)
    return LogLine(event="memory_usage", values=values, text=text)


def decode_line(snapshot: StepSnapshot, tokens_per_s: float) -> LogLine:
    """Return the line of every 40th step with decodes; `tokens_per_s` is since the line before."""
    text = (
        f"Decode batch. #running-req: {snapshot.num_running}, "
        f"#token: {snapshot.used_blocks * snapshot.block_size}, "
        f"token usage: {snapshot.used_blocks / snapshot.num_blocks:.2f}, "
        f"gen throughput (token/s): {tokens_per_s:.2f}, #queue-req: {snapshot.num_queued}"
    )
    values = {
        "running_requests": snapshot.num_running,
        "tokens": snapshot.used_blocks * snapshot.block_size,
        "token_usage": round(snapshot.used_blocks / snapshot.num_blocks, 4),
        "tokens_per_s": round(tokens_per_s, 2),
        "waiting_requests": snapshot.num_queued,
    }
    return LogLine(event="decode_batch", values=values, text=text, is_of_step=True)


def prefill_line(
    snapshot: StepSnapshot, *, num_seqs: int, num_new: int, num_cached: int, hit_rate: float
) -> LogLine:
    """
    Return the line of a batch that computes prompts.

    Args:
        snapshot: The core after planning the batch.
        num_seqs: Requests with prompts in the batch; the other running ones are #running-req.
        num_new: Tokens of these prompts that it computes.
        num_cached: Tokens that the requests it admits found in the prefix cache.
        hit_rate: Cached share of all tokens of prompts so far, 0 to 1.
    """
    text = (
        f"Prefill batch. #new-seq: {num_seqs}, #new-token: {num_new}, "
        f"#cached-token: {num_cached}, cache hit rate: {100 * hit_rate:.2f}%, "
        f"token usage: {snapshot.used_blocks / snapshot.num_blocks:.2f}, "
        f"#running-req: {snapshot.num_running - num_seqs}, #queue-req: {snapshot.num_queued}"
    )
    values = {
        "new_requests": num_seqs,
        "new_tokens": num_new,
        "cached_tokens": num_cached,
        "cache_hit_rate": round(hit_rate, 4),
        "token_usage": round(snapshot.used_blocks / snapshot.num_blocks, 4),
        "running_requests": snapshot.num_running - num_seqs,
        "waiting_requests": snapshot.num_queued,
    }
    return LogLine(event="prefill_batch", values=values, text=text, is_of_step=True)


def retraction_line(num_retracted: int, before: float, after: float) -> LogLine:
    """Return the line of one retraction, with the new-token ratio before and after it."""
    text = (
        f"decode out of memory happened, #retracted_reqs: {num_retracted}, "
        f"#new_token_ratio: {before:.4f} -> {after:.4f}"
    )
    values = {
        "retracted_requests": num_retracted,
        "new_token_ratio_before": round(before, 4),
        "new_token_ratio": round(after, 4),
    }
    return LogLine(
        event="decode_out_of_memory", values=values, text=text, is_warning=True, is_of_step=True
    )


def preemption_line(ids: Mapping[str, str], mode: str, num_preempted: int) -> LogLine | None:
    """
    Return the warning of the first and every 50th preemption for want of blocks, else None.

    Args:
        ids: `log_ids` of the request.
        mode: What becomes of its KV cache.
        num_preempted: Preemptions for want of blocks so far, with this one.
    """
    if num_preempted != 1 and num_preempted % PREEMPTION_LINE_INTERVAL:
        return None
    text = (
        f"Request {ids['request_id']} is preempted (by {mode}) because there is not enough KV "
        "cache space. This can affect the end-to-end performance. Give the KV cache more memory "
        "(max_num_blocks, buffer_size_gb, mem_fraction_static or gpu_memory_utilization, "
        "whichever is set), lower max_batch_size, or raise schedule_conservativeness. "
        f"total_num_cumulative_preemption={num_preempted}"
    )
    values = {**ids, "by": mode, "preemptions": num_preempted}
    return LogLine(
        event="request_preempted", values=values, text=text, is_warning=True, is_of_step=True
    )


def sentence_line(event: str, text: str, ids: Mapping[str, object] = NO_IDS) -> LogLine:
    """Return a warning whose values are its sentence, and ids of what it is about."""
    return LogLine(event=event, values={"message": text, **ids}, text=text, is_warning=True)


class StepLog:
    """
    Counts for the log lines, and the step at which the next decode line is due.

    Attributes:
        due_step: Number of steps with decodes at which a plan writes the next decode line.
    """

    __slots__ = ("_num_cached", "_num_computed", "_since_s", "_since_tokens", "due_step")

    def __init__(self) -> None:
        self.due_step = DECODE_LINE_INTERVAL
        self._since_s = 0.0
        self._since_tokens = 0
        self._num_cached = 0
        self._num_computed = 0

    def wake(self, now: float, output_tokens: int) -> None:
        """Count throughput from here on, as work begins again."""
        self._since_s, self._since_tokens = now, output_tokens

    def decode_line(self, snapshot: StepSnapshot, output_tokens: int, now: float) -> LogLine:
        """
        Return the decode line that is due.

        Its throughput counts output tokens received since the line before, or since the core was
        last idle, per second of `now`'s clock.
        """
        passed_s = now - self._since_s
        tokens_per_s = (output_tokens - self._since_tokens) / passed_s if passed_s > 0 else 0.0
        self.due_step += DECODE_LINE_INTERVAL
        self.wake(now, output_tokens)
        return decode_line(snapshot, tokens_per_s)

    def prefill_line(
        self, snapshot: StepSnapshot, *, num_seqs: int, num_new: int, num_cached: int
    ) -> LogLine:
        """Return the line of a batch that computes prompts, and count it for the hit rate."""
        self._num_cached += num_cached
        self._num_computed += num_new
        total = self._num_cached + self._num_computed
        return prefill_line(
            snapshot,
            num_seqs=num_seqs,
            num_new=num_new,
            num_cached=num_cached,
            hit_rate=self._num_cached / total if total else 0.0,
        )
