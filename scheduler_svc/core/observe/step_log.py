"""
The lines that operators of SGLang and vLLM watch, from the numbers of one step.

Their words are those tools' own, so that what reads those logs reads these.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.request.events import LogLine

DECODE_LINE_INTERVAL = 40
"""Decode passes from one decode line to the next."""
PREEMPTION_LINE_INTERVAL = 50
"""Preemptions for want of blocks from one warning to the next, after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSnapshot:
    """
    The core as one step's plan left it.

    Attributes:
        num_running: Requests that run and are not paused.
        num_queued: Requests that wait.
        used_blocks: KV blocks that somebody holds; cached ones nobody uses are none of them.
        num_blocks: All KV blocks.
        block_size: Tokens per block.
    """

    num_running: int
    num_queued: int
    used_blocks: int
    num_blocks: int
    block_size: int


def decode_line(snapshot: StepSnapshot, tokens_per_s: float) -> LogLine:
    """The line of every 40th decode pass; `tokens_per_s` is since the line before."""
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
    return LogLine(event="decode_batch", values=values, text=text)


def prefill_line(
    snapshot: StepSnapshot, *, num_seqs: int, num_new: int, num_cached: int, hit_rate: float
) -> LogLine:
    """
    The line of a batch that computes prompts.

    Args:
        snapshot: The core after planning it.
        num_seqs: Requests whose prompts it computes; the other running ones are #running-req.
        num_new: Tokens it computes of them.
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
    return LogLine(event="prefill_batch", values=values, text=text)


def retraction_line(num_retracted: int, before: float, after: float) -> LogLine:
    """The line of one retraction, with the new-token ratio around it."""
    text = (
        f"decode out of memory happened, #retracted_reqs: {num_retracted}, "
        f"#new_token_ratio: {before:.4f} -> {after:.4f}"
    )
    values = {
        "retracted_requests": num_retracted,
        "new_token_ratio_before": round(before, 4),
        "new_token_ratio": round(after, 4),
    }
    return LogLine(event="decode_out_of_memory", values=values, text=text, is_warning=True)


def preemption_line(request_id: str, mode: str, num_preempted: int) -> LogLine | None:
    """The warning of the first and of every 50th preemption for want of blocks."""
    if num_preempted != 1 and num_preempted % PREEMPTION_LINE_INTERVAL:
        return None
    text = (
        f"Request {request_id} is preempted (by {mode}) because there is not enough KV cache "
        "space. This can affect the end-to-end performance. Give the KV cache more memory "
        "(max_num_blocks, buffer_size_gb, mem_fraction_static or gpu_memory_utilization, "
        "whichever is set), lower max_batch_size, or raise schedule_conservativeness. "
        f"total_num_cumulative_preemption={num_preempted}"
    )
    values = {"request_id": request_id, "by": mode, "preemptions": num_preempted}
    return LogLine(event="request_preempted", values=values, text=text, is_warning=True)


def sentence_line(event: str, text: str) -> LogLine:
    """A warning that says all in its sentence."""
    return LogLine(event=event, values={"message": text}, text=text, is_warning=True)


class StepLog:
    """
    When the next decode line is due, and what has been counted for the lines.

    Attributes:
        due_step: The decode pass whose plan writes the next decode line.
    """

    __slots__ = ("_num_cached", "_num_computed", "_since_s", "_since_tokens", "due_step")

    def __init__(self) -> None:
        self.due_step = DECODE_LINE_INTERVAL
        self._since_s = 0.0
        self._since_tokens = 0
        self._num_cached = 0
        self._num_computed = 0

    def wake(self, now: float, output_tokens: int) -> None:
        """Work begins again: throughput is counted from here on."""
        self._since_s, self._since_tokens = now, output_tokens

    def decode_line(self, snapshot: StepSnapshot, output_tokens: int, now: float) -> LogLine:
        """
        The decode line that is due.

        Its throughput counts output tokens seen since the line before, or since the core was last
        idle, per second of `now`'s clock.
        """
        passed_s = now - self._since_s
        tokens_per_s = (output_tokens - self._since_tokens) / passed_s if passed_s > 0 else 0.0
        self.due_step += DECODE_LINE_INTERVAL
        self.wake(now, output_tokens)
        return decode_line(snapshot, tokens_per_s)

    def prefill_line(
        self, snapshot: StepSnapshot, *, num_seqs: int, num_new: int, num_cached: int
    ) -> LogLine:
        """The line of a batch that computes prompts, counted for the hit rate."""
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
