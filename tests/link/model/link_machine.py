"""The rules by which hypothesis drives the link's world."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.link.commands import KvMode
from tests.link.model.model_requests import Place
from tests.link.model.world import Parts, World

WHO = st.sampled_from([0, 0, 0, 0, 1, 2])
ANY = st.integers(0, 7)
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6)
NUM_OUTPUTS = st.integers(2, 10)
MAX_LIVE_REQUESTS = 5
MAX_REQUESTS = 16
MAX_PROMPT_LEN = 14
MAX_FORK_OUTPUTS = 5
"""
Number of outputs of a fork: prompt plus outputs stay below the 20 tokens that a slot can hold.
"""

EVENTS = ("plan", "plan", "down", "down", "up", "up", "start", "finish", "compute", "beat")
DISASTERS = (
    *("kill", "step fails", "step fails"),
    *("open", "inherit", "take over", "reopen", "answer lost"),
)
REPEATS = ("repeat down", "repeat up")
TRAFFIC = st.lists(st.tuples(st.sampled_from(EVENTS + REPEATS), ANY), min_size=2, max_size=16)


class LinkMachine(RuleBasedStateMachine):
    """One rule per kind of event; the world checks the invariants and the end."""

    window = 1
    parts = Parts()

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.window, self.parts)

    @initialize(prompts=st.lists(TOKENS, min_size=1, max_size=3), rounds=st.integers(0, 5))
    def begin(self, prompts: list[list[int]], rounds: int) -> None:
        """Attach a first scheduler and let it work."""
        for prompt in prompts:
            self.submit(0, prompt, 10)
        self.world.mend(0, take_over=False)
        self.world.mend(0, take_over=False)
        self.pump(0, 3, rounds + 1)

    @rule(who=WHO, prompt=TOKENS, max_outputs=NUM_OUTPUTS)
    def submit(self, who: int, prompt: list[int], max_outputs: int) -> None:
        self.submit_prompt(who, prompt, max_outputs, None)

    def submit_prompt(self, who, prompt, max_outputs, parent) -> None:
        scheduler = self.world.schedulers[who]
        live = [r for r in scheduler.requests if r.place is not Place.ENDED]
        if len(live) < MAX_LIVE_REQUESTS and len(scheduler.requests) < MAX_REQUESTS:
            scheduler.submit(prompt, max_outputs, parent)

    @rule(who=WHO, which=ANY, tail=st.lists(st.integers(0, 3), max_size=2), chunk=st.integers(1, 5))
    def fork(self, who: int, which: int, tail: list[int], chunk: int) -> None:
        """
        Submit a request that continues the tokens of another, so that blocks are shared and copied.
        """
        rows = list(self.world.schedulers[who].rows.values())
        if rows:
            parent = rows[which % len(rows)].request
            prompt = [*parent.tokens, *tail][:MAX_PROMPT_LEN]
            self.submit_prompt(who, prompt, MAX_FORK_OUTPUTS, parent)
            self.world.plan(who, chunk, 5)

    @rule(who=WHO, events=TRAFFIC, which=ANY)
    def traffic(self, who: int, events: list[tuple[str, int]], which: int) -> None:
        """Move messages in any order; `which` picks among streams old and new."""
        self.world.mend(who, take_over=False)
        for kind, number in events:
            self.one_event(who, kind, number, which)
            self.world.check()

    def one_event(self, who: int, kind: str, number: int, which: int) -> None:
        world = self.world
        streams = world.all_streams()
        stream = streams[which % len(streams)] if streams else None
        if kind == "plan":
            world.plan(who, number + 1, number % 3)
        elif kind == "beat":
            world.heartbeat()
        elif kind in ("start", "compute"):
            world.start()
        if kind in ("finish", "compute"):
            world.finish()
        if stream is not None and kind in REPEATS:
            stream.repeat(kind.removeprefix("repeat "), number, which)
        for _ in range(1 + number % 3 if stream is not None else 0):
            if kind == "down":
                world.deliver_down(stream)
            elif kind == "up":
                world.deliver_up(stream)

    @rule(who=WHO, chunk=st.integers(1, 5), rounds=st.integers(1, 6))
    def pump(self, who: int, chunk: int, rounds: int) -> None:
        """Run rounds without a fault."""
        self.world.mend(who, take_over=False)
        for _ in range(rounds):
            self.world.pump(who, chunk, 2)

    @rule(seconds=st.sampled_from([0.2, 1.0, 4.0, 11.0]), beat=st.booleans())
    def wait(self, seconds: float, beat: bool) -> None:
        self.world.now += seconds
        if beat:
            self.world.heartbeat()

    @rule(who=WHO, executor_notices=st.booleans(), scheduler_notices=st.booleans())
    def cut(self, who: int, executor_notices: bool, scheduler_notices: bool) -> None:
        self.world.cut(who, executor_notices=executor_notices, scheduler_notices=scheduler_notices)

    @rule(who=WHO, which=ANY, detach=st.booleans())
    def connect(self, who: int, which: int, detach: bool) -> None:
        """
        Open a new stream; the stream before it may still deliver, or its end is noticed now
        (`detach`).
        """
        self.world.connect(who)
        if detach:
            self.world.late_detach(which)

    @rule(what=st.sampled_from(DISASTERS), who=WHO)
    def disaster(self, what: str, who: int) -> None:
        if what == "kill":
            self.world.boot()
        elif what == "step fails":
            self.world.fail_among_others(who)
        else:
            other = {"open": 1, "inherit": 2 if who == 0 else 0}
            self.world.open(
                other.get(what, who),
                take_over=what == "take over",
                answer_arrives=what != "answer lost",
            )

    @rule(who=WHO, which=ANY)
    def preempt(self, who: int, which: int) -> None:
        scheduler = self.world.schedulers[who]
        rows = list(scheduler.rows.values())
        if rows:
            scheduler.preempt(rows[which % len(rows)])
            self.world.plan(who, 1 + which, 5)

    @rule(who=WHO, which=ANY)
    def abort(self, who: int, which: int) -> None:
        scheduler = self.world.schedulers[who]
        live = [r for r in scheduler.requests if r.place is not Place.ENDED]
        if live:
            scheduler.abort(live[which % len(live)])

    @rule(who=WHO, mode=st.sampled_from(list(KvMode)))
    def suspend_or_resume(self, who: int, mode: KvMode) -> None:
        if self.world.schedulers[who].suspended:
            self.world.resume(who)
        else:
            self.world.suspend(who, mode)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        holds = [self.world.holder == scheduler.name for scheduler in self.world.schedulers]
        for who in sorted(range(len(holds)), key=lambda who: holds[who]):
            self.world.settle(who)
