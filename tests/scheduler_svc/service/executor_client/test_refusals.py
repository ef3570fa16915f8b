"""Reports of executors that answer and are not used."""

from __future__ import annotations

import structlog

from scheduler_svc.executor_client.link_events import ConnectFailed
from scheduler_svc.ipc import snapshot
from tandem.errors import IncompatibleExecutor, SessionHeld


def attached(bench):
    """Return a frontend of a service that has its executor."""
    frontend = bench.frontend()
    bench.until(lambda: frontend.availabilities[-1].executor_attached)
    return frontend


def test_names_that_a_peer_chose_do_not_stand_for_those_of_the_log(bench):
    """
    A refusal with metadata of any names is logged without hiding the log's own keys, and the
    service goes on.
    """
    attached(bench)
    told = dict.fromkeys(("event", "reason", "message", "address", "retry_in_s", "more"), "x")
    with structlog.testing.capture_logs() as logs:
        held = SessionHeld("held", metadata=told)
        bench.link.post(ConnectFailed(error=held, retry_in_s=1.0, address="a:1"))
        bench.turn()
    (logged,) = [log for log in logs if log["event"] == "executor_connect_failed"]
    assert ["SESSION_HELD", "held", "a:1", 1.0, "x"] == [
        logged[name] for name in ("reason", "message", "address", "retry_in_s", "more")
    ]


def test_what_others_said_is_forgotten_once_the_own_one_is_back(bench):
    """
    Another executor's refusal is told while the own one is away, not after its stream is attached
    again.
    """
    frontend = attached(bench)
    bench.link.cut()
    bench.link.is_up = False
    bench.turn()
    other = IncompatibleExecutor("another block size")
    bench.link.post(ConnectFailed(error=other, retry_in_s=0.0, address="b:1"))
    bench.until(lambda: frontend.availabilities[-1].refusal == "another block size")
    bench.link.is_up = True
    bench.link.go_on()
    bench.until(lambda: frontend.availabilities[-1].executor_attached)
    assert "" == frontend.availabilities[-1].refusal
    stats = snapshot.decode_stats(bench.reply(frontend, "stats").result)
    assert ("", 1) == (stats.executor_refusal, stats.executor_sessions)
