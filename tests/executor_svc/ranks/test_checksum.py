"""The checksum by which ranks compare their devices."""

from __future__ import annotations

from tests.executor_svc.stepping import Bench, Row, batch

PROMPT = [5, 6, 7, 8]


def stepped(directory) -> Bench:
    """Return a model with two sequences after their prompts."""
    bench = Bench.build(directory)
    admits = [bench.admit(slot, PROMPT) for slot in (0, 3)]
    rows = [Row(slot, 0, len(PROMPT)) for slot in (0, 3)]
    bench.runner.execute(batch(*rows, admits=admits), 1)
    return bench


class TestChecksum:
    def test_same_steps_give_the_same_checksum(self, model_dir):
        """
        Runners that took the same steps agree, and each step changes what they agree on.
        """
        one, other = stepped(model_dir), stepped(model_dir)
        before = one.runner.checksum()
        assert before == other.runner.checksum()
        for bench in (one, other):
            bench.runner.execute(batch(Row(0, len(PROMPT))), 2)
        assert before != one.runner.checksum() == other.runner.checksum()

    def test_planted_token_is_seen(self, model_dir):
        """
        A sampled token that differs on one device alone changes the checksum there.
        """
        one, other = stepped(model_dir), stepped(model_dir)
        other.runner._tokens.history[3, len(PROMPT)] ^= 1
        assert one.runner.checksum() != other.runner.checksum()

    def test_no_live_slot_has_a_checksum_too(self, model_dir):
        """
        Without a live slot all ranks agree.
        """
        one, other = Bench.build(model_dir), Bench.build(model_dir)
        assert one.runner.checksum() == other.runner.checksum()
