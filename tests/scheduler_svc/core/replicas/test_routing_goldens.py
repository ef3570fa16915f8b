"""The executor that each request of a sequence prefers, written out by hand for every policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions, Routing
from scheduler_svc.core.routing.prefix_table import Match, PrefixTable
from tests.scheduler_svc.core.harness import geometry_of, small_config
from tests.scheduler_svc.core.replicas.fleet_rig import FleetRig

BLOCKS = {
    letter: [10 * at + place for place in range(4)] for at, letter in enumerate("ABCDEFGHIJKLMN")
}
"""Blocks of four tokens; the same letter is the same block where all before it are the same."""


def prompt_of(text: str) -> np.ndarray:
    """Return the prompt with these blocks; a dot adds a token that fills none."""
    tokens = [token for letter in text.rstrip(".") for token in BLOCKS[letter]]
    return np.array(tokens + [7] * text.count("."), np.int32)


class Fleet:
    """Executors that plan nothing, and requests that come and prefer one of them."""

    def __init__(
        self, policy: Routing, num_executors: int = 3, alpha: float = 1.0, **options: bool
    ) -> None:
        chosen = CoreOptions(routing=policy, prefix_caching_routing_alpha=alpha, **options)
        self.rig = FleetRig(num_executors, options=chosen)

    def send(self, text: str, **changes) -> int:
        """Submit a prompt; returns the handle."""
        return self.rig.submit(prompt=prompt_of(text), **changes)

    def preferred(self, handle: int) -> int | None:
        """Return the executor that a request prefers."""
        core = self.rig.core
        return core._cell.router.preferred(core._cell.requests.find(handle))

    def preferences(self, *texts: str) -> list[int | None]:
        """Submit prompts; returns the executor that each prefers."""
        return [self.preferred(self.send(text)) for text in texts]

    def lose(self, number: int) -> None:
        """Let an executor be lost, and be away until `come_back`."""
        self.rig.engines[number].port.executor_lost(self.rig.now)
        self.rig.core.check_integrity()

    def come_back(self, number: int) -> None:
        """Let an executor be back that has no room, so that it admits nothing."""
        self.rig.core._fleet[number].gate.note_back()


class TestRoundRobin:
    def test_each_executor_has_its_turn(self):
        """The prompts do not matter."""
        fleet = Fleet(Routing.ROUND_ROBIN)
        assert [0, 1, 2, 0, 1, 2, 0] == fleet.preferences("AB", "AB", "AB", "C", "AB", ".", "AB")

    def test_the_round_skips_an_executor_that_is_away(self):
        """The requests that preferred it go on with the round, and it has its turns again when it is back."""
        fleet = Fleet(Routing.ROUND_ROBIN)
        first = [fleet.send("A") for _ in range(5)]
        assert [0, 1, 2, 0, 1] == [fleet.preferred(handle) for handle in first]
        fleet.lose(1)
        # The two that preferred 1 come first, in order of arrival.
        assert [0, 2, 2, 0, 0] == [fleet.preferred(handle) for handle in first]
        assert [2, 0] == fleet.preferences("A", "A")
        fleet.come_back(1)
        assert [1, 2, 0] == fleet.preferences("A", "A", "A")

    def test_one_that_joins_has_its_turn_after_the_others(self):
        """Numbers go up, and the round is in their order."""
        fleet = Fleet(Routing.ROUND_ROBIN, 2)
        assert [0, 1, 0] == fleet.preferences("A", "A", "A")
        fleet.rig.attach()
        assert [1, 2, 0] == fleet.preferences("A", "A", "A")

    def test_with_one_executor_no_request_has_a_preference(self):
        """There is nothing to choose from, and nothing is kept."""
        fleet = Fleet(Routing.ROUND_ROBIN, 1)
        assert [None, None] == fleet.preferences("A", "B")

    def test_a_request_that_one_executor_cannot_hold_prefers_another(self):
        """A turn that no executor can take is not lost: the next that can has it."""
        config = small_config()
        fleet = Fleet(Routing.ROUND_ROBIN, 1)
        fleet.rig.attach(replace(geometry_of(config), num_blocks=4))
        fleet.rig.attach()
        long = [fleet.preferred(fleet.send("ABCDEFGH", max_tokens=20)) for _ in range(3)]
        assert [0, 2, 0] == long
        assert [1, 2] == fleet.preferences("A", "A")


class TestFirstPrefixBlock:
    def test_equal_first_blocks_go_to_one_executor(self):
        """New first blocks and prompts without a full one go round robin."""
        fleet = Fleet(Routing.FIRST_PREFIX_BLOCK)
        found = fleet.preferences("AB", "CD", "AE", ".", "CF", "EA", "A", "FA", "EB")
        assert [0, 1, 0, 2, 1, 0, 0, 1, 0] == found

    def test_only_the_first_block_is_known(self):
        """A prompt that begins with another one's second block shares nothing with it."""
        fleet = Fleet(Routing.FIRST_PREFIX_BLOCK)
        assert [0, 1, 1, 0] == fleet.preferences("AB", "B", "BA", "ABB")

    def test_a_lost_executor_is_not_preferred_any_more(self):
        """Its entries are purged, so that the block goes round robin, once, and then there."""
        fleet = Fleet(Routing.FIRST_PREFIX_BLOCK)
        waiting = [fleet.send("AB"), fleet.send("CD"), fleet.send("AC")]
        assert [0, 1, 0] == [fleet.preferred(handle) for handle in waiting]
        fleet.lose(0)
        assert [2, 1, 2] == [fleet.preferred(handle) for handle in waiting]
        assert [2, 1, 1] == fleet.preferences("AD", "CE", "E")
        fleet.come_back(0)
        assert [2, 2, 0, 0] == fleet.preferences("AE", "F", "G", "GA")


class TestLongestPrefix:
    def test_the_deepest_known_block_decides(self):
        """With alpha 1, as in the source: of executors that have it, the one assigned last."""
        fleet = Fleet(Routing.LONGEST_PREFIX)
        assert [0, 1, 0, 2, 0, 1] == fleet.preferences("AB", "CD", "ABC", "E", "ABD", "CDE")

    def test_all_blocks_of_a_routed_prompt_are_noted(self):
        """A prompt that goes on where another ended finds that whole one."""
        table = PrefixTable(capacity=10)
        table.assign([b"a", b"b"], 0)
        table.assign([b"a", b"c"], 1)
        table.assign([b"a", b"b", b"d"], 0)
        assert {0: Match(3, 3), 1: Match(1, 2)} == table.matches([b"a", b"b", b"d"], {0, 1, 2})
        assert {1: Match(2, 2), 0: Match(1, 3)} == table.matches([b"a", b"c", b"e"], {0, 1, 2})
        assert {1: Match(2, 2)} == table.matches([b"a", b"c"], {1, 2})
        table.purge(0)
        assert {1: Match(1, 2)} == table.matches([b"a", b"b", b"d"], {0, 1, 2})

    def test_blocks_assigned_longest_ago_are_forgotten_last_one_first(self):
        """The beginning of a prompt is left, which is what others share."""
        table = PrefixTable(capacity=4)
        table.assign([b"a", b"b", b"c"], 0)
        table.assign([b"x", b"y"], 1)
        assert {0: Match(2, 1)} == table.matches([b"a", b"b", b"c"], {0, 1})
        assert {1: Match(2, 2)} == table.matches([b"x", b"y"], {0, 1})
        table.resize(2)
        assert {} == table.matches([b"a", b"b", b"c"], {0, 1})

    def test_one_system_prompt_goes_to_one_executor_under_pure_affinity(self):
        """As in the source; half the weight on free places spreads it over all of them."""
        shared = [f"A{letter}" for letter in "BCDEFGHIJ"]
        assert [0] * 9 == Fleet(Routing.LONGEST_PREFIX).preferences(*shared)
        # Four places each. Half of a prompt known is worth 0.5 * 1/2, one place 0.5 * 1/4: with two
        # requests more than another, an executor ties with it, and the table then says which was
        # assigned last; with three it loses. So: 0, 0, 0 (tie of 0.25 + 0.25 and 0.5: 0 is known),
        # 1 (0.25 + 0.125 against 0.5), 1 (0.25 + 0.375), 1 (0.25 + 0.25 and 0.5: 1 is known),
        # 2 (0.5 against 0.375 of both), 2, 2.
        found = Fleet(Routing.LONGEST_PREFIX, alpha=0.5).preferences(*shared)
        assert [0, 0, 0, 1, 1, 1, 2, 2, 2] == found

    def test_with_alpha_0_free_places_alone_decide(self):
        """Between equals, the one assigned the prompt last, then the lowest number."""
        fleet = Fleet(Routing.LONGEST_PREFIX, alpha=0.0)
        assert [0, 1, 2, 2, 1, 0] == fleet.preferences("AB", "AB", "AB", "ABC", "ABC", "ABC")

    def test_no_match_goes_round_robin_whatever_the_load(self):
        """A new prompt does not ask for free places."""
        fleet = Fleet(Routing.LONGEST_PREFIX, alpha=0.5)
        assert [0, 0, 1, 2, 0] == fleet.preferences("ABC", "ABC", "D", "E", "F")

    def test_a_place_is_free_again_when_its_request_has_ended(self):
        """The count of requests per executor goes down with each that ends."""
        fleet = Fleet(Routing.LONGEST_PREFIX, 2, alpha=0.0)
        first, second = fleet.send("A"), fleet.send("A")
        assert [0, 1] == [fleet.preferred(first), fleet.preferred(second)]
        fleet.rig.end(first)
        # 0 has four free places and 1 has three; then both have three, and 0 was assigned last.
        assert [0, 0] == fleet.preferences("A", "A")
        fleet.rig.end(second)
        assert [1] == fleet.preferences("A")

    def test_a_lost_executor_is_purged_and_what_waits_for_it_prefers_others(self):
        """In the source its entries stay, and affinity goes on choosing it."""
        fleet = Fleet(Routing.LONGEST_PREFIX)
        waiting = [fleet.send("AB"), fleet.send("CD"), fleet.send("ABE")]
        assert [0, 1, 0] == [fleet.preferred(handle) for handle in waiting]
        fleet.lose(0)
        assert [2, 1, 2] == [fleet.preferred(handle) for handle in waiting]
        assert [2] == fleet.preferences("ABEF")
        fleet.come_back(0)
        # It is empty: only the round reaches it, with a prompt that no executor knows.
        assert [2, 1, 0, 0] == fleet.preferences("ABEF", "CDE", "G", "GH")

    def test_an_executor_that_left_is_not_preferred_any_more(self):
        """Nor is a request left to it; its number is never used again."""
        fleet = Fleet(Routing.LONGEST_PREFIX)
        waiting = [fleet.send("AB"), fleet.send("AC")]
        fleet.rig.detach(0)
        assert [1, 1] == [fleet.preferred(handle) for handle in waiting]
        assert [1, 2] == fleet.preferences("AD", "D")

    def test_while_all_are_lost_no_request_has_a_preference(self):
        """The first executor that is back takes what waits."""
        fleet = Fleet(Routing.LONGEST_PREFIX, 2)
        handle = fleet.send("AB")
        fleet.lose(0)
        fleet.lose(1)
        assert fleet.preferred(handle) is None
        assert [None] == fleet.preferences("AB")

    @pytest.mark.parametrize("policy", [Routing.LONGEST_PREFIX, Routing.FIRST_PREFIX_BLOCK])
    def test_without_prefix_caching_requests_go_round_robin(self, policy):
        """There are no digests to know a prompt by."""
        fleet = Fleet(policy, prefix_caching=False)
        assert [0, 1, 2, 0] == fleet.preferences("AB", "AB", "AB", "AB")

    def test_prompts_of_another_salt_share_nothing(self):
        """Tenants that are kept apart do not learn from one another's routes."""
        fleet = Fleet(Routing.LONGEST_PREFIX)
        handles = [fleet.send("AB", cache_salt=salt) for salt in (b"x", b"y", b"x")]
        assert [0, 1, 0] == [fleet.preferred(handle) for handle in handles]


class TestChoices:
    def test_choices_of_one_request_prefer_one_executor(self):
        """The request is routed once, and each choice takes a place there."""
        fleet = Fleet(Routing.ROUND_ROBIN)
        first = fleet.send("AB", num_choices=3)
        assert [0, 0, 0] == [fleet.preferred(first + choice) for choice in range(3)]
        assert [1] == fleet.preferences("AB")
        fleet.lose(0)
        assert [2, 2, 2] == [fleet.preferred(first + choice) for choice in range(3)]


class TestBinding:
    def test_a_request_that_another_executor_took_is_known_there(self):
        """The table learns where the KV is; the route follows."""
        fleet = Fleet(Routing.LONGEST_PREFIX, 2)
        rig = fleet.rig
        handle = fleet.send("AB")
        assert 0 == fleet.preferred(handle)
        rig.now += 1.0
        rig.turn(1)
        assert 1 == fleet.preferred(handle)
        assert [1, 1] == fleet.preferences("AB", "ABC")

    def test_under_load_balanced_nothing_is_preferred_before_admission(self):
        """A request belongs to no executor while it waits."""
        fleet = Fleet(Routing.LOAD_BALANCED)
        handle = fleet.send("AB")
        assert fleet.preferred(handle) is None
        fleet.rig.turn(2)
        fleet.rig.turn(0)
        assert 0 == fleet.preferred(handle)
