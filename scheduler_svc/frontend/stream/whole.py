"""Whole answer of a request: the messages of its stream, joined, up to a bound."""

from __future__ import annotations

from collections.abc import AsyncIterator

from scheduler_svc.frontend.stream.delta import OutputDelta, logprobs_of
from scheduler_svc.frontend.stream.stream import Message
from tandem.errors import ResponseTooLarge
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import stream_pb2

MAX_COMPLETE_BYTES = 4_000_000
"""Largest answer; clients of gRPC refuse messages over 4 MiB unless they are told otherwise."""
_BYTES_PER_MESSAGE = 6
"""Most bytes of tag and length around a message inside another."""


class WholeAnswer:
    """Answer that grows with the messages of a stream."""

    def __init__(self) -> None:
        self._response = pb.CompleteResponse()
        self._completions: dict[int, pb.Completion] = {}
        self._texts: dict[int, list[str]] = {}
        self._num_bytes = 0

    def add(self, delta: OutputDelta) -> None:
        """
        Add new output.

        Raises:
            ResponseTooLarge: The answer is larger than one message may be.
        """
        chunk = delta.chunk
        completion = self._completion(delta.choice)
        logprobs = logprobs_of(delta)
        self._num_bytes += sum(one.ByteSize() + _BYTES_PER_MESSAGE for one in logprobs)
        completion.logprobs.extend(logprobs)
        if delta.with_ids:
            self._num_bytes += 4 * len(chunk.token_ids)
            completion.token_ids.extend(chunk.token_ids)
        if delta.with_text:
            self._num_bytes += len(chunk.text.encode())
            self._texts.setdefault(delta.choice, []).append(chunk.text)
        self._check_size()

    def add_prompt(self, told: stream_pb2.PromptLogprobs) -> None:
        """
        Add log probabilities of prompt tokens.

        Raises:
            ResponseTooLarge: The answer is larger than one message may be.
        """
        self._num_bytes += told.ByteSize() + _BYTES_PER_MESSAGE * len(told.logprobs)
        self._check_size()
        self._response.prompt_logprobs.MergeFrom(told)
        self._response.prompt_logprobs.first_position = 0

    def start(self, started: stream_pb2.Started) -> None:
        """Take the first message."""
        self._response.started.CopyFrom(started)

    def finish_choice(self, finished: stream_pb2.Finished) -> None:
        """Note the end of a choice."""
        completion = self._completion(finished.choice)
        completion.choice = finished.choice
        completion.reason = finished.reason
        completion.text = "".join(self._texts.get(finished.choice, ()))
        if finished.HasField("stop_string"):
            completion.stop_string = finished.stop_string
        elif finished.HasField("token_id"):
            completion.token_id = finished.token_id

    def finish(self, done: stream_pb2.Done) -> pb.CompleteResponse:
        """Return the answer with its last message."""
        self._response.done.CopyFrom(done)
        completions = self._completions
        self._response.completions.extend(completions[choice] for choice in sorted(completions))
        return self._response

    def _check_size(self) -> None:
        if self._num_bytes > MAX_COMPLETE_BYTES:
            raise ResponseTooLarge(
                f"the answer is larger than {MAX_COMPLETE_BYTES} bytes: use Generate, which "
                "streams it.",
                metadata={"limit_bytes": str(MAX_COMPLETE_BYTES)},
            )

    def _completion(self, choice: int) -> pb.Completion:
        return self._completions.setdefault(choice, pb.Completion())


async def collect(messages: AsyncIterator[Message]) -> pb.CompleteResponse:
    """
    Return the whole answer of a stream.

    Raises:
        ResponseTooLarge: It is larger than one message may be.
    """
    whole = WholeAnswer()
    response = pb.CompleteResponse()
    async for message in messages:
        if isinstance(message, OutputDelta):
            whole.add(message)
            continue
        match message.WhichOneof("event"):
            case "started":
                whole.start(message.started)
            case "prompt_logprobs":
                whole.add_prompt(message.prompt_logprobs)
            case "finished":
                whole.finish_choice(message.finished)
            case "done":
                response = whole.finish(message.done)
    return response
