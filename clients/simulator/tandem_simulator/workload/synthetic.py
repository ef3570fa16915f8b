"""Workloads drawn at random from a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tandem.errors import InvalidConfig
from tandem.link.batch import Int32Column
from tandem_simulator.workload.ask import Ask, random_ids
from tandem_simulator.workload.distributions import Arrivals, Lengths, zipf_ranks

_PREFIX, _BODY = 1, 2

_POISSON = Arrivals.parse("poisson")
_PROMPT_LEN = Lengths.parse("lognormal:400:0.8:4096")
_OUTPUT_LEN = Lengths.parse("lognormal:200:0.7:1024")
_PREFIX_LEN = Lengths.parse("fixed:512")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """
    Parameters of a synthetic workload.

    Attributes:
        requests: How many requests, all turns of conversations counted.
        request_rate: Requests per second; conversations begin at this rate divided by the requests
            that each has.
        arrivals: poisson, constant, gamma:CV, bursts:SIZE or at-once.
        prompt_len: Tokens of a prompt beyond its shared prefix, or that a turn adds: N,
            uniform:MIN:MAX, lognormal:MEAN:SIGMA:MAX or zipf:EXPONENT:MAX.
        output_len: Tokens the model produces, same forms.
        max_tokens: Most tokens any request asks for; longer outputs are cut there.
        ask_slack: Requests ask for this many times what they will produce, at most max_tokens; none
            for clients that cannot tell and all ask for max_tokens.
        prefix_groups: How many different shared prefixes; 0 for none.
        prefix_len: Tokens of each shared prefix, same forms as prompt_len.
        prefix_skew: Zipf exponent of the prefixes' popularity; 0 makes all equal.
        turns: Turns per conversation; each prompt contains all earlier prompts and outputs.
        forks: Branches into which each conversation splits after its first answer; each has all
            the turns left, as when an agent tries several ways at once.
        think_s: Mean seconds between an answer and the next turn, exponential.
        tenants: How many tenants share the requests.
        tenant_skew: Zipf exponent of the tenants' shares; 0 makes all equal.
        isolate_tenants: Tenants share no KV: each has a cache salt of its own.
        priorities: How many priority levels, 0 up, equally often.
        choices: Completions per prompt.
        timeout_s: Deadline of each request after its arrival; none for none.
    """

    requests: int = 1000
    request_rate: float = 30.0
    arrivals: Arrivals = _POISSON
    prompt_len: Lengths = _PROMPT_LEN
    output_len: Lengths = _OUTPUT_LEN
    max_tokens: int = 1024
    ask_slack: float | None = None
    prefix_groups: int = 0
    prefix_len: Lengths = _PREFIX_LEN
    prefix_skew: float = 1.0
    turns: int = 1
    forks: int = 1
    think_s: float = 5.0
    tenants: int = 1
    tenant_skew: float = 0.0
    isolate_tenants: bool = False
    priorities: int = 1
    choices: int = 1
    timeout_s: float | None = None

    def validate(self) -> None:
        """
        Check every range.

        Raises:
            InvalidConfig: A value is out of range; the error names the first.
        """
        at_least = {
            "requests": 1, "request_rate": 0, "max_tokens": 1, "prefix_groups": 0,
            "prefix_skew": 0, "turns": 1, "forks": 1, "think_s": 0, "tenants": 1,
            "tenant_skew": 0, "priorities": 1, "choices": 1,
        }  # fmt: skip
        for name, least in at_least.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise InvalidConfig(f"{name} is {value}: it must be {least} or more", field=name)
        if self.request_rate == 0:
            raise InvalidConfig("request_rate is 0: it must be over 0", field="request_rate")
        for name in ("timeout_s", "ask_slack"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidConfig(f"{name} is {value}: it must be over 0", field=name)


PRESETS: dict[str, Workload] = {
    "plain": Workload(),
    "shared-prefix": Workload(
        request_rate=30.0,
        prompt_len=Lengths.parse("lognormal:120:0.8:1024"),
        output_len=Lengths.parse("lognormal:150:0.7:1024"),
        prefix_groups=64,
        prefix_len=Lengths.parse("uniform:512:2048"),
        prefix_skew=0.6,
        arrivals=Arrivals.parse("bursts:8"),
    ),
    "chat": Workload(
        request_rate=12.0,
        prompt_len=Lengths.parse("lognormal:80:0.9:1024"),
        output_len=Lengths.parse("lognormal:180:0.7:512"),
        max_tokens=512,
        prefix_groups=8,
        prefix_len=Lengths.parse("fixed:400"),
        turns=5,
        think_s=8.0,
    ),
    "agent": Workload(
        request_rate=40.0,
        prompt_len=Lengths.parse("lognormal:150:0.8:1024"),
        output_len=Lengths.parse("lognormal:60:0.7:256"),
        max_tokens=256,
        prefix_groups=4,
        prefix_len=Lengths.parse("fixed:1500"),
        turns=10,
        forks=3,
        think_s=1.0,
    ),
    "long-tail": Workload(
        request_rate=6.0,
        prompt_len=Lengths.parse("lognormal:600:1.3:6000"),
        output_len=Lengths.parse("lognormal:250:1.1:2048"),
        max_tokens=2048,
        arrivals=Arrivals.parse("gamma:2"),
    ),
    "reasoning": Workload(
        request_rate=8.0,
        prompt_len=Lengths.parse("lognormal:150:0.8:1024"),
        output_len=Lengths.parse("lognormal:600:0.9:4096"),
        max_tokens=4096,
    ),
}
"""Workloads by name."""


class Synthetic:
    """Requests of a `Workload`: columns are drawn at once, prompts built as they are sent."""

    def __init__(self, workload: Workload, seed: int, max_model_len: int) -> None:
        """
        Draw everything but the prompts.

        Args:
            workload: Parameters to draw with.
            seed: Seed of everything that is drawn.
            max_model_len: Most tokens of a request; a conversation ends before a turn that exceeds
                them.

        Raises:
            InvalidConfig: A value is out of range.
        """
        workload.validate()
        self._workload = workload
        self._seed = seed
        self._max_model_len = max_model_len
        count, turns = workload.requests, workload.turns
        rng = np.random.Generator(np.random.PCG64(seed))
        per_conversation = 1 + workload.forks * (turns - 1)
        num_openings = -(-count // per_conversation)
        rate = workload.request_rate / per_conversation
        self._arrival_s = workload.arrivals.draw(rng, num_openings, rate)
        self._body_len = workload.prompt_len.draw(rng, count)
        self._output_len = workload.output_len.draw(rng, count)
        self._think_s = rng.exponential(workload.think_s, count) if turns > 1 else np.zeros(count)
        groups = max(workload.prefix_groups, 1)
        self._group = zipf_ranks(rng, num_openings, groups, workload.prefix_skew)
        self._prefix_len = workload.prefix_len.draw(rng, groups)
        self._tenant = zipf_ranks(rng, num_openings, workload.tenants, workload.tenant_skew)
        self._priority = rng.integers(0, workload.priorities, num_openings)

    @property
    def max_handles(self) -> int:
        """Most completions that it can ask for, all choices counted."""
        return self._workload.requests * self._workload.choices

    def opening(self) -> Iterator[Ask]:
        """Yield the first turns, in order of arrival."""
        for number in range(len(self._arrival_s)):
            yield self._ask(number, 0, 0, self._prefix(number), float(self._arrival_s[number]))

    def follow(self, ask: Ask, outputs: Int32Column, now: float) -> list[Ask]:
        """Return the next turn of a conversation, for each branch after its first."""
        turn = ask.turn + 1
        if turn >= self._workload.turns:
            return []
        history = np.concatenate([ask.prompt, outputs])
        followers = []
        for branch in range(self._workload.forks) if ask.turn == 0 else [ask.branch]:
            number = self._number(ask.conversation, turn, branch)
            if number >= self._workload.requests:
                continue
            arrival_s = now + float(self._think_s[number])
            follower = self._ask(ask.conversation, turn, branch, history, arrival_s)
            if len(follower.prompt) + follower.max_tokens <= self._max_model_len:
                followers.append(follower)
        return followers

    def _number(self, conversation: int, turn: int, branch: int) -> int:
        # Numbers go turn by turn, so that the last conversations are the ones that are cut short.
        column = 1 + (turn - 1) * self._workload.forks + branch if turn else 0
        return column * len(self._arrival_s) + conversation

    def _prefix(self, conversation: int) -> Int32Column:
        if not self._workload.prefix_groups:
            return np.empty(0, np.int32)
        group = int(self._group[conversation])
        return random_ids(self._seed, _PREFIX, group, int(self._prefix_len[group]))

    def _ask(
        self, conversation: int, turn: int, branch: int, history: Int32Column, arrival_s: float
    ) -> Ask:
        workload, number = self._workload, self._number(conversation, turn, branch)
        body = random_ids(self._seed, _BODY, number, int(self._body_len[number]))
        output_len, asked = int(self._output_len[number]), workload.max_tokens
        if workload.ask_slack is not None:
            asked = min(asked, math.ceil(output_len * workload.ask_slack))
        tenant = f"tenant-{self._tenant[conversation]}" if workload.tenants > 1 else ""
        return Ask(
            arrival_s=arrival_s,
            prompt=np.concatenate([history, body]),
            output_len=output_len,
            max_tokens=asked,
            priority=int(self._priority[conversation]),
            tenant=tenant,
            cache_salt=tenant.encode() if workload.isolate_tenants else b"",
            num_choices=workload.choices,
            timeout_s=workload.timeout_s,
            conversation=conversation if workload.turns > 1 else -1,
            turn=turn,
            branch=branch,
        )
