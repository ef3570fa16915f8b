"""One request's messages, in their order: Started, Progress, Delta, Finished, Done."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from scheduler_svc.core.events import ProgressKind
from scheduler_svc.core.request import FinishReason
from scheduler_svc.frontend.inbox import StreamInbox
from scheduler_svc.frontend.output import OutputChunk, OutputText
from scheduler_svc.ipc.messages import StreamEnd, StreamProgress
from tandem.errors import InternalError
from tandem.inference.v1 import stream_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateResponse


async def stream_messages(
    inbox: StreamInbox,
    output: OutputText,
    *,
    started: stream_pb2.Started,
    end_at_stop_string: Callable[[int], None],
) -> AsyncGenerator[GenerateResponse, None]:
    """
    Yield the stream of a request that was handed to the core.

    Everything that arrives while the consumer is busy is merged into the next message.

    Args:
        inbox: The core's news about it.
        output: Fresh.
        started: The first message.
        end_at_stop_string: Called once, with the number of output tokens up to the one that
            completed a stop string.

    Raises:
        TandemError: The request was refused or failed; what was produced before was yielded.
    """
    while not inbox.accepted:
        await inbox.wait()
        refusal = inbox.take().failure if not inbox.accepted else None
        if refusal is not None:
            raise refusal
    yield GenerateResponse(started=started)

    progress = StreamProgress(inbox.stream_id, ProgressKind.QUEUED, 0)
    is_end_asked = False
    while True:
        news = inbox.take()
        for token_id in news.token_ids:
            output.push(token_id)
        chunk = output.take() if news.end is None else output.finish()
        if output.stopped is not None and news.end is None and not is_end_asked:
            is_end_asked = True
            end_at_stop_string(output.num_tokens)
        progress = news.progress or progress
        # What brought the first token with it came before it.
        if news.progress is not None or (news.is_silent and chunk is None and news.end is None):
            yield _progress(progress)
        if chunk is not None:
            yield _delta(chunk)
        if news.failure is not None:
            raise news.failure
        if news.end is not None:
            _check_complete(output, news.end)
            yield _finished(output, news.end)
            yield _done(output, news.end)
            return
        await inbox.wait()


def _delta(chunk: OutputChunk) -> GenerateResponse:
    # Filled in place: one of these per token, and nested constructors copy.
    message = GenerateResponse()
    delta = message.delta
    delta.first_token_offset = chunk.first_token_offset
    delta.token_ids.extend(chunk.token_ids)
    delta.text = chunk.text
    return message


def _progress(progress: StreamProgress) -> GenerateResponse:
    message = stream_pb2.Progress()
    if progress.kind == ProgressKind.QUEUED:
        message.queued.position = progress.value
    elif progress.kind == ProgressKind.SCHEDULED:
        message.scheduled.cached_tokens = progress.value
    else:
        message.prefilled.done_tokens = progress.value
    return GenerateResponse(progress=message)


def _check_complete(output: OutputText, end: StreamEnd) -> None:
    if output.stopped is None and output.num_tokens != end.num_output_tokens:
        raise InternalError(
            f"the request ended after {end.num_output_tokens} output tokens, "
            f"but {output.num_tokens} arrived"
        )


def _finished(output: OutputText, end: StreamEnd) -> GenerateResponse:
    if output.stopped is not None:
        finished = stream_pb2.Finished(
            reason=int(FinishReason.STOP_STRING),  # type: ignore[arg-type]  # numbers are the same
            stop_string=output.stopped.stop,
        )
    else:
        finished = stream_pb2.Finished(reason=end.reason, token_id=end.matched_token)  # type: ignore[arg-type]  # numbers are the same
    return GenerateResponse(finished=finished)


def _done(output: OutputText, end: StreamEnd) -> GenerateResponse:
    return GenerateResponse(
        done=stream_pb2.Done(
            usage=stream_pb2.Usage(
                prompt_tokens=end.num_prompt_tokens,
                output_tokens=output.num_tokens,
                cached_tokens=end.num_cached_tokens,
            ),
            timings=stream_pb2.Timings(
                queue_s=end.queue_s,
                time_to_first_token_s=end.first_token_s or 0.0,
                total_s=end.total_s,
                preemptions=end.num_preemptions,
            ),
        )
    )
