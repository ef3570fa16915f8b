"""The rule by which a loop counts as stuck."""

from scheduler_svc.process.tick_watch import LONGEST_LOOK_S, TickWatch


class TestTickWatch:
    def test_loop_that_turns_is_never_silent(self):
        """
        A loop that has turned since the last look has been silent for no time.
        """
        watch = TickWatch(now=0.0)
        assert [0.0] * 100 == [watch.look(turn, float(turn)) for turn in range(100)]

    def test_silence_adds_up_and_ends_with_a_turn(self):
        """
        Time without a turn is counted from the last look that found one.
        """
        watch = TickWatch(now=0.0)
        found = [watch.look(turns, now) for turns, now in ((5, 1.0), (5, 2.0), (5, 3.5), (6, 4.0))]
        assert [0.0, 1.0, 2.5, 0.0] == found

    def test_time_in_which_the_watch_was_stopped_does_not_count(self):
        """
        The time in which the whole process was stopped hardly counts, since its loop could not
        turn.
        """
        watch = TickWatch(now=0.0)
        watch.look(5, 1.0)
        assert LONGEST_LOOK_S == watch.look(5, 3601.0)
