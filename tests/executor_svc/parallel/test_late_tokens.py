"""Tokens that another stage sampled, in the histories of slots."""

from __future__ import annotations

import numpy as np
import torch

from executor_svc.slots.tokens import SlotTokens
from tests.executor_svc.stepping import admission, int32

MAX_MODEL_LEN = 8


class Arrival:
    """Tokens that arrive when they are waited for, or before."""

    def __init__(self, token: torch.Tensor, values: list[int]) -> None:
        self._token, self._values = token, values
        self.is_here = False

    def wait(self) -> None:
        self._token.copy_(torch.tensor(self._values))
        self.is_here = True


class Histories:
    """Histories of three slots, and what is on its way to them."""

    def __init__(self) -> None:
        self.tokens = SlotTokens(3, MAX_MODEL_LEN, 100, torch.device("cpu"))

    def expect(self, places: list[tuple[int, int]], values: list[int]) -> Arrival:
        """Expect tokens at slots and positions."""
        token = torch.full((len(places),), 99, dtype=torch.int32)
        arrival = Arrival(token, values)
        slot, position = (int32(column) for column in zip(*places, strict=True))
        self.tokens.write_late(slot, position, token, arrival)
        return arrival

    def read(self, slot: int, position: int) -> int:
        found = self.tokens.gather(int32([slot]), np.array([position], np.int64))
        return int(found)


class TestLateTokens:
    def test_place_that_is_read_is_waited_for(self):
        """
        A token is there for whatever reads it, with those that were expected before it; later ones
        and other places are not waited for.
        """
        histories = Histories()
        arrivals = [histories.expect([(0, 2), (1, 3)], [5, 6])]
        arrivals += [histories.expect([(0, 3)], [7]), histories.expect([(1, 4)], [8])]
        assert 0 == histories.read(2, 2)
        assert [False, False, False] == [arrival.is_here for arrival in arrivals]
        assert 7 == histories.read(0, 3)
        assert [True, True, False] == [arrival.is_here for arrival in arrivals]
        assert 6 == histories.read(1, 3)

    def test_token_that_is_not_valid_is_0(self):
        """
        A row whose logits were not valid leaves token 0, as on the stage that sampled.
        """
        histories = Histories()
        histories.expect([(0, 2), (1, 2)], [-1, 5])
        assert [0, 5] == [histories.read(slot, 2) for slot in (0, 1)]

    def test_admission_keeps_its_own_tokens(self):
        """
        A slot that goes to another sequence meanwhile keeps that one's tokens; past its end lies
        what would have lain there, had the token come at once.
        """
        histories = Histories()
        histories.expect([(0, 2), (1, 2)], [50, 51])
        histories.expect([(0, 3), (1, 3)], [60, 61])
        histories.tokens.admit(admission(0, [1, 2, 3], [1]))
        assert [1, 2, 3, 60] == [histories.read(0, position) for position in range(4)]
        assert [51, 61] == [histories.read(1, position) for position in (2, 3)]

    def test_arrived_tokens_are_kept_no_longer(self):
        """
        Tokens that a result was made of are written with the next ones that are expected.
        """
        histories = Histories()
        histories.expect([(0, 2)], [5]).wait()
        later = histories.expect([(0, 3)], [6])
        assert 5 == histories.tokens.history[0, 2]
        assert not later.is_here

    def test_whole_histories_are_complete(self):
        """
        Penalties count every token.
        """
        histories = Histories()
        histories.expect([(0, 1)], [5])
        histories.expect([(1, 1)], [6])
        found = histories.tokens.histories(int32([0, 1]), 2)
        assert [[0, 5], [0, 6]] == found.tolist()
