"""The blocking client."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from tandem_client import (
    NO_RETRY,
    AdminClient,
    ChannelOptions,
    Client,
    DeadlineExceeded,
    Delta,
    Done,
    Draining,
    Finished,
    FinishReason,
    InternalError,
    InvalidParameter,
    ModelChanged,
    NotFound,
    PeerUnavailable,
    PromptTooLong,
    Queued,
    QueueFull,
    RequestNotFound,
    RetryPolicy,
    Setting,
    Started,
    is_serving,
)
from tests.clients.python.fake_server import ANSWER, CHOSEN_SEED, PATIENCE_S, Act

SOON = RetryPolicy(max_attempts=4, initial_delay_s=0.001, max_delay_s=0.001)
"""Retries that do not make tests wait."""


@pytest.fixture
def client(server):
    """A client of the fake that retries at once."""
    with Client(server.address, retry=SOON) as connected:
        yield connected


class TestGenerate:
    def test_stream_yields_the_grammar_in_order(self, client):
        """
        A stream is Started, progress, deltas, Finished and Done, as plain values.
        """
        events = list(client.generate("hi"))

        assert [Started, Queued, Delta] == [type(event) for event in events[:3]]
        assert [Finished, Done] == [type(event) for event in events[-2:]]
        assert Finished(choice=0, reason=FinishReason.STOP_STRING, matched="!") == events[-2]
        assert len(ANSWER) == events[-1].usage.output_tokens

    def test_text_is_the_whole_answer_in_pieces(self, client):
        """
        The pieces of `text` concatenate to the output, and the stream keeps what framed them.
        """
        stream = client.generate("hi")

        assert ANSWER == "".join(stream.text)
        assert CHOSEN_SEED == stream.started.params.seed
        assert FinishReason.STOP_STRING == stream.finished.reason
        assert 1.5 == stream.done.timings.total_s

    def test_offsets_count_the_ids_before(self, client):
        """
        Every delta's offset is the number of ids delivered before it.
        """
        deltas = [event for event in client.generate("hi") if isinstance(event, Delta)]

        ids = []
        for delta in deltas:
            assert len(ids) == delta.first_token_offset
            ids += delta.token_ids
        assert [ord(character) for character in ANSWER] == ids

    def test_refusal_is_the_servers_own_class(self, client, server):
        """
        A refused request raises the server's error with its field and is not tried again.
        """
        server.play(Act(accept=False, error=PromptTooLong("too long", field="prompt.text")))

        with pytest.raises(PromptTooLong, match="too long") as refused:
            list(client.generate("hi"))
        assert "prompt.text" == refused.value.field
        assert 1 == len(server.seen.generate)

    def test_closing_cancels_the_request(self, client, server):
        """
        Closing a stream ends its call on the server, and its iteration ends quietly.
        """
        server.play(Act(num_tokens=5, hang=True))
        stream = client.generate("hi")
        next(stream)
        assert server.seen.hanging.wait(PATIENCE_S)
        stream.close()

        assert [] == [event for event in stream if isinstance(event, Finished)]
        assert server.seen.cancelled.wait(PATIENCE_S)

    def test_leaving_the_block_cancels_the_request(self, client, server):
        """
        Leaving a stream's `with` block before its end cancels the call.
        """
        server.play(Act(num_tokens=5, hang=True))
        with client.generate("hi") as stream:
            next(stream)
            assert server.seen.hanging.wait(PATIENCE_S)

        assert server.seen.cancelled.wait(PATIENCE_S)

    def test_close_from_another_thread_ends_a_waiting_iteration(self, client, server):
        """
        A thread that waits for the next event leaves when another closes the stream.
        """
        server.play(Act(num_tokens=5, hang=True))
        stream = client.generate("hi")
        text = queue.Queue()
        reader = threading.Thread(target=lambda: [text.put(piece) for piece in stream.text])
        reader.start()
        heard = ""
        while heard != ANSWER[:5]:
            heard += text.get(timeout=PATIENCE_S)
        stream.close()
        reader.join(PATIENCE_S)

        assert not reader.is_alive()
        assert text.empty()

    def test_close_while_the_call_is_made_cancels_it(self, client, server, monkeypatch):
        """
        A stream that is closed by another thread before its call is known there ends all the same.
        """
        server.play(Act(hang=True))
        start = client._call

        def start_and_close(*arguments):
            call = start(*arguments)
            stream.close()
            return call

        monkeypatch.setattr(client, "_call", start_and_close)
        stream = client.generate("hi", deadline_s=PATIENCE_S)
        assert [] == list(stream)

    def test_deadline_cancels(self, client, server):
        """
        A passed deadline raises DeadlineExceeded that names the gRPC code, and ends the call.
        """
        server.play(Act(num_tokens=2, hang=True))

        for deadline_s in (0.3, 3.0, 30.0):  # a call that a slow machine has not made is not ended
            with pytest.raises(DeadlineExceeded) as passed:
                list(client.generate("hi", deadline_s=deadline_s))
            assert "DEADLINE_EXCEEDED" == passed.value.metadata["grpc_code"]
            if server.seen.hanging.is_set():
                break
        assert server.seen.cancelled.wait(PATIENCE_S)

    def test_stream_without_done_is_the_servers_fault(self, client, server):
        """
        A stream that ends well but without Done raises InternalError, after all that it brought.
        """
        server.play(Act(num_tokens=2, ends_early=True))
        stream, brought = client.generate("hi"), []
        with pytest.raises(InternalError, match="ended the stream before Done"):
            brought.extend(stream.text)
        assert ANSWER[:2] == "".join(brought)

    def test_bug_of_the_server_keeps_its_text(self, client, server):
        """
        An InternalError of the server is raised as one, with the server's words.
        """
        server.play(Act(num_tokens=2, error=InternalError("a bug")))
        with pytest.raises(InternalError, match="a bug"):
            list(client.generate("hi"))


class TestRetry:
    def test_overload_is_retried_until_it_passes(self, client, server):
        """
        RESOURCE_EXHAUSTED with RetryInfo is tried again, and the caller sees one whole stream.
        """
        full = Act(accept=False, error=QueueFull("full", retry_after_s=0.001))
        server.play(full, full, Act())

        assert ANSWER == "".join(client.generate("hi").text)
        assert 3 == len(server.seen.generate)

    def test_retries_are_bounded(self, client, server):
        """
        After max_attempts tries the server's error is raised.
        """
        server.play(Act(accept=False, error=Draining("bye", retry_after_s=0.001)))

        with pytest.raises(Draining, match="bye"):
            list(client.generate("hi"))
        assert 4 == len(server.seen.generate)

    def test_no_retry_raises_the_first_failure(self, server):
        """
        With NO_RETRY a transient failure is raised at once.
        """
        server.play(Act(accept=False, error=Draining("bye")), Act())
        with Client(server.address, retry=NO_RETRY) as client, pytest.raises(Draining):
            list(client.generate("hi"))

        assert 1 == len(server.seen.generate)

    def test_complete_is_retried_too(self, client, server):
        """
        A unary call recovers from a transient failure as well.
        """
        server.play(Act(error=QueueFull("full", retry_after_s=0.001)), Act())

        assert ANSWER == client.complete("hi").text
        assert 2 == len(server.seen.complete)

    def test_unreachable_server_is_named(self):
        """
        A server that cannot be reached raises PeerUnavailable after the last try.
        """
        with Client("127.0.0.1:1", retry=SOON) as client, pytest.raises(PeerUnavailable):
            client.get_model()


class TestResume:
    @pytest.mark.parametrize("piece_lens", [(1, 3), (2,), (5, 1)], ids=str)
    @pytest.mark.parametrize("num_tokens", [0, 1, 4, 6], ids=str)
    def test_broken_stream_goes_on_after_what_was_delivered(
        self, client, server, piece_lens, num_tokens
    ):
        """
        A stream that breaks is asked for again with its seed; nothing is lost or repeated.
        """
        server.play(Act(num_tokens=num_tokens, error=Draining("bye")), Act(piece_lens=piece_lens))
        events = list(client.generate("hi", request_id="mine", temperature=0.5))

        deltas = [event for event in events if isinstance(event, Delta)]
        assert ANSWER == "".join(delta.text for delta in deltas)
        ids = []
        for delta in deltas:
            assert len(ids) == delta.first_token_offset
            ids += delta.token_ids
        assert [ord(character) for character in ANSWER] == ids
        assert 1 == sum(isinstance(event, Started) for event in events)
        second = server.seen.generate[1]
        assert (CHOSEN_SEED, "mine", 0.5) == (
            second.sampling.seed,
            second.request_id,
            second.sampling.temperature,
        )

    def test_rest_is_asked_for_with_what_was_delivered(self, client, server):
        """
        The repetition brings the delivered ids and the same key; the request is otherwise as it was.
        """
        server.play(Act(num_tokens=6, error=Draining("bye")), Act())
        list(client.generate("hi", stop=["x"]))

        first, second = server.seen.generate
        assert not first.HasField("resume")
        (prior,) = second.resume.choices
        assert (0, [ord(c) for c in ANSWER[:6]], False) == (
            prior.choice,
            list(prior.token_ids),
            prior.finished,
        )
        assert 32 == len(first.attempt_key)
        assert first.attempt_key == second.attempt_key
        assert ["x"] == list(second.stopping.stop)
        assert (0, 100) == (first.stopping.max_tokens, second.stopping.max_tokens)

    def test_rest_is_drawn_as_the_beginning_was(self, client, server):
        """
        The repetition says all that a server may have defaults of its own for, as the first server resolved it.
        """
        server.play(Act(num_tokens=6, error=Draining("bye")), Act())
        stream = client.generate("hi")
        list(stream)

        first, second = server.seen.generate
        assert not first.HasField("sampling")
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"):
            assert second.sampling.HasField(name)
            assert getattr(stream.started.params, name) == getattr(second.sampling, name)

    def test_connection_that_breaks_again_and_again_is_survived(self, client, server):
        """
        A stream goes on however often it breaks, as long as each call brings something new.
        """
        breaks = [Act(num_tokens=n, error=Draining("bye", retry_after_s=0.0)) for n in range(2, 30)]
        server.play(*breaks, Act())
        stream = client.generate("hi")
        assert ANSWER == "".join(stream.text)
        assert 29 == len(server.seen.generate)

    def test_stream_that_gets_no_further_is_given_up(self, client, server):
        """
        A request that is accepted and broken without anything new for 16 times raises its failure.
        """
        server.play(Act(num_tokens=3, error=Draining("bye", retry_after_s=0.0)))
        with pytest.raises(Draining, match="bye"):
            list(client.generate("hi"))
        assert 17 == len(server.seen.generate)

    def test_server_that_begins_anew_is_an_error(self, client, server):
        """
        A server that sends what was delivered already does not go on: nothing is delivered twice.
        """
        server.play(Act(num_tokens=8, error=Draining("bye")), Act(resumes=False))

        with pytest.raises(InternalError, match="goes on after 0"):
            list(client.generate("hi"))

    def test_times_of_a_resumed_stream_are_those_of_its_reader(self, client, server):
        """
        Done of a stream that broke counts from the first call.
        """
        server.play(Act(num_tokens=8, error=Draining("bye", retry_after_s=0.0)), Act())
        began_s = time.monotonic()
        stream = client.generate("hi")
        list(stream)
        whole_s = time.monotonic() - began_s
        timings = stream.done.timings
        assert 0 < timings.time_to_first_token_s < timings.total_s <= whole_s
        assert len(ANSWER) == stream.done.usage.output_tokens

    def test_deadline_counts_while_the_server_is_away(self, server):
        """
        A stream that waits for its server ends when the deadline passes.
        """
        server.play(Act(num_tokens=8, error=Draining("bye", retry_after_s=100.0)))
        with Client(server.address) as client, pytest.raises(DeadlineExceeded) as passed:
            list(client.generate("hi", deadline_s=0.3))
        assert "DEADLINE_EXCEEDED" == passed.value.metadata["grpc_code"]

    def test_close_ends_the_wait_for_a_server(self, server):
        """
        Closing a stream that waits for its server ends it, and nothing more is asked for.
        """
        server.play(Act(num_tokens=8, error=Draining("bye", retry_after_s=100.0)))
        waits = threading.Event()
        policy = RetryPolicy(on_break=lambda error, wait_s: waits.set())
        with Client(server.address, retry=policy) as client:
            stream = client.generate("hi")
            reader = threading.Thread(target=lambda: list(stream))
            reader.start()
            assert waits.wait(PATIENCE_S)
            stream.close()
            reader.join(PATIENCE_S)
            assert not reader.is_alive()
        assert 1 == len(server.seen.generate)

    def test_break_is_told(self, server):
        """
        The on_break callback hears what failed and how long the client waits.
        """
        told = []
        server.play(Act(num_tokens=8, error=Draining("bye", retry_after_s=0.001)), Act())
        policy = RetryPolicy(on_break=lambda error, wait_s: told.append((error.reason, wait_s)))
        with Client(server.address, retry=policy) as client:
            list(client.generate("hi"))
        ((reason, wait_s),) = told
        assert "DRAINING" == reason
        assert 0.001 <= wait_s <= 0.00125

    def test_other_model_is_not_resumed(self, client, server):
        """
        A stream never goes on with another model than it began with.
        """
        server.play(Act(num_tokens=8, error=Draining("bye")), Act(revision="revision-2"))

        with pytest.raises(ModelChanged):
            list(client.generate("hi"))

    def test_resume_can_be_switched_off(self, server):
        """
        Without resume a stream that began raises its failure, however transient.
        """
        server.play(Act(num_tokens=8, error=Draining("bye")), Act())
        policy = RetryPolicy(initial_delay_s=0.001, resume=False)
        with Client(server.address, retry=policy) as client, pytest.raises(Draining):
            list(client.generate("hi"))

        assert 1 == len(server.seen.generate)


class TestUnaryCalls:
    def test_complete_returns_all_of_it(self, client):
        """
        `complete` returns text, ids, reason, what matched, parameters and usage.
        """
        completion = client.complete("hi", seed=7)

        assert (ANSWER, FinishReason.EOS, 2) == (
            completion.text,
            completion.reason,
            completion.matched,
        )
        assert tuple(map(ord, ANSWER)) == completion.token_ids
        assert 7 == completion.params.seed
        assert 3 == completion.usage.prompt_tokens

    def test_complete_has_a_deadline(self, client, server):
        """
        A unary call that takes too long raises DeadlineExceeded.
        """
        server.play(Act(hang=True))

        with pytest.raises(DeadlineExceeded):
            client.complete("hi", deadline_s=0.3)

    def test_abort_of_an_unknown_id_is_not_found(self, client):
        """
        Abort succeeds for a live request and raises RequestNotFound for any other.
        """
        client.abort("live")

        with pytest.raises(RequestNotFound, match="'gone'"):
            client.abort("gone")

    def test_model_is_described(self, client):
        """
        `get_model` returns name, limits and defaults.
        """
        model = client.get_model()

        assert ("fake", 128, 512, (2,)) == (
            model.name,
            model.vocab_size,
            model.max_model_len,
            model.eos_token_ids,
        )
        assert model.capabilities.chat

    def test_metadata_goes_with_every_call(self, server):
        """
        Metadata of the channel options, a token say, is sent with each call.
        """
        options = ChannelOptions(metadata=(("authorization", "Bearer secret"),))
        with Client(server.address, options=options) as client:
            client.complete("hi")
            list(client.generate("hi"))

        assert ["Bearer secret"] * 2 == [seen["authorization"] for seen in server.seen.metadata]

    def test_proxy_of_the_environment_is_not_asked_for_this_machine(self, server, monkeypatch):
        """
        One or two servers on this machine are reached although the environment names a proxy.
        """
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        for servers in (server.address, [server.address] * 2):
            assert "fake" == Client(servers, retry=NO_RETRY).get_model().name

    def test_unsendable_argument_is_refused_before_any_call(self, client, server):
        """
        An argument that the message cannot carry raises InvalidParameter and sends nothing.
        """
        with pytest.raises(InvalidParameter):
            client.generate("hi", seed=-1)
        assert [] == server.seen.generate


class TestAdmin:
    def test_stats_drain_and_config(self, server):
        """
        The admin client returns stats, remaining requests and settings as plain values.
        """
        with AdminClient(server.address) as admin:
            stats = admin.stats()
            assert (2, 5, 9, 1.5) == (
                stats.running_requests,
                stats.used_blocks,
                stats.total_blocks,
                stats.uptime_s,
            )
            assert [1, 1] == [admin.drain(), admin.drain(0.0)]
            assert [
                Setting(name="block_size", value=16, source="default"),
                Setting(name="listen", value="127.0.0.1:1", source="flag"),
            ] == admin.config()
        assert [None, 0.0] == server.seen.drain_grace_s

    def test_health_is_asked_by_name(self, server):
        """
        `is_serving` follows the server's health, and an unknown name is an error.
        """
        assert is_serving(server.address, "tandem.ready", timeout_s=PATIENCE_S)
        server.set_health("tandem.ready", False)
        assert not is_serving(server.address, "tandem.ready", timeout_s=PATIENCE_S)
        with pytest.raises(NotFound):
            is_serving(server.address, "no such name", timeout_s=PATIENCE_S)
