"""Whatever hosts, the coordinator and restarts do in between: the same request has the same answer, nothing
that was sampled is sampled again, and each trajectory gets the reward that its host reports."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config_sections import EnvironmentSection
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, TurnAnswer, VersionSpan
from antiphon.core.seeds import conversation_seed, derive_seed
from antiphon.environments.host import HostEnvironment
from antiphon.services.reward.sessions import HOSTS_KEPT, UNKNOWN, Refused, SeatReport, Sessions, Taken
from tests.support.hosted_rows import Row

SEATS, GROUP = 2, 4
TIMEOUT_S, FORGET_S = 10.0, 100.0


def changed(seat: SeatReport, **changes: Any) -> SeatReport:
    return seat.model_copy(update=changes)


def environment(**changes: Any) -> HostEnvironment:
    section = EnvironmentSection(name="host", train_size=8, heldout_size=4, seats=SEATS)
    return HostEnvironment(section.model_copy(update=changes))


def sessions_at(now: float, **changes: Any) -> Sessions:
    return Sessions(
        environment(**changes),
        {"train": GROUP, "heldout": SEATS},
        vocabulary=1000,
        max_tokens=64,
        host_timeout_s=TIMEOUT_S,
        forget_s=FORGET_S,
        now=now,
    )


def says(name: str, context: Sequence[int]) -> list[int]:
    """Return what the policy samples after a context."""
    seed = derive_seed("policy", name, *context)
    return [500 + (seed >> 8 * i) % 400 for i in range(1 + seed % 3)]


class Play:
    """One episode of a host, which does the same again when it is begun again; one of its turns is rendered
    afresh."""

    def __init__(self, taken: Taken, index: int) -> None:
        self.group_id, self.index = taken.group, index
        episode = taken.episodes[[e.episode for e in taken.episodes].index(index)]
        self.names, (self.take, *_) = zip(*(one.split("@") for one in episode.trajectories), strict=True)
        self.contexts = {name: [1 + i, 2, episode.seed % 90] for i, name in enumerate(self.names)}
        self.branches: dict[str, list[list[int]]] = {name: [] for name in self.names}
        self.turns = 0

    @property
    def asks(self) -> str:
        """The trajectory whose turn it is; "" at the end."""
        return self.names[self.turns % SEATS] if self.turns < 5 else ""

    def hear(self, said: Sequence[int]) -> None:
        name = self.asks
        whole = [*self.contexts[name], *said]
        if len(self.branches[name]) == 0 or self.turns in (2, 3):
            self.branches[name].append(whole)
        else:
            self.branches[name][-1] = whole
        begins = {0: [7, 8, whole[-1] % 100], 1: [7] * 40}  # one shorter and one longer than its row
        self.contexts[name] = begins.get(self.turns, [*whole, 9, sum(said) % 100])
        self.turns += 1

    def report(self) -> list[SeatReport]:
        return [
            SeatReport(
                trajectory=self.called(name),
                reward=(sum(self.branches[name][-1]) % 11) / 10,
                branches=self.said(name),
            )
            for name in self.names
        ]

    def called(self, name: str) -> str:
        return f"{name}@{self.take}"

    def said(self, name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.branches[name]))


class World:
    """A coordinator with its workers, and hosts, around `Sessions`."""

    def __init__(self, groups: int) -> None:
        self.now = 0.0
        self.sessions = sessions_at(self.now)
        self.rows = {f"g{g}/{i}": Row(f"g{g}/{i}", says) for g in range(groups) for i in range(GROUP)}
        self.plays: dict[tuple[str, int], tuple[str, Play]] = {}
        self.told: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self.hosts = 0
        self.loses = 0
        """How often answers are lost on their way."""

    def ask(self, name: str) -> None:
        if self.rows[name].over is None:
            group = name.rpartition("/")[0]
            over = tuple(i for i in range(GROUP) if self.rows[f"{group}/{i}"].over is not None)
            self.sessions.asked(replace(self.rows[name].question(), over=over), self.now)
            self.settle()

    def settle(self) -> None:
        """Let workers hear what was decided, as often as it is said."""
        answers, self.sessions.outbox = self.sessions.outbox, []
        if answers and self.loses:
            self.loses -= 1
            return
        for answer in answers:
            row = self.rows[f"{answer.group_id}/{answer.sample_index}"]
            if row.over is None and row.question().row_digest == answer.row_digest:
                row.hear(answer)
            self.sessions.journalled(answer)

    def take(self) -> None:
        self.hosts += 1
        taken = self.sessions.take(f"h{self.hosts}", self.now)
        self.settle()
        if taken is not None:
            names = [[one.partition("@")[0] for one in e.trajectories] for e in taken.episodes]
            left = [any(self.rows[name].over is None for name in one) for one in names]
            assert left and all(left), "there is something to do in each episode"
            assert {e.seed for e in taken.episodes} == {conversation_seed(0, taken.key)}
            for episode in taken.episodes:
                play = Play(taken, episode.episode)
                self.plays[taken.group, episode.episode] = f"h{self.hosts}", play

    def step(self, place: tuple[str, int]) -> None:
        host, play = self.plays[place]
        name = play.asks
        if not name:
            reason = self.sessions.report(host, play.group_id, play.index, play.report(), self.now)
            self.settle()
            if reason is None:
                return
            assert reason == ""
            assert self.sessions.report(host, play.group_id, play.index, play.report(), self.now) == ""
            del self.plays[place]
            return
        try:
            turn = self.sessions.request(play.called(name), play.contexts[name], self.now)
        except Refused:  # it had heard nothing when the gateway started again, or another host had it
            assert self.rows[name].over is not None or not self.rows[name].tokens
            del self.plays[place]
            return
        self.settle()
        if turn is None:
            return
        said = turn.token_ids.tolist()
        assert self.told.setdefault((name, tuple(play.contexts[name])), said) == said
        assert turn.logprobs.tolist() == [-0.5] * len(said)
        assert turn.spans == (VersionSpan(3, 0, len(said)),)
        play.hear(said)

    def alive(self) -> None:
        for host in {host for host, _ in self.plays.values()}:
            groups = [group for (group, _), (one, _) in self.plays.items() if one == host]
            _, lost = self.sessions.alive(host, groups, self.now)
            self.settle()
            for place in [place for place in self.plays if place[0] in lost]:
                del self.plays[place]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.sessions.tick(self.now)
        self.settle()
        self.alive()

    def restart(self) -> None:
        """Another gateway process: it knows nothing, and what it was told is lost."""
        self.sessions = sessions_at(self.now)

    def finish(self) -> None:
        for _ in range(400):
            for name in self.rows:
                self.ask(name)
            self.take()
            for place in list(self.plays):
                self.step(place)
            self.pass_time(0.5)
            if all(row.over is not None for row in self.rows.values()):
                return
        raise AssertionError([row for row in self.rows.values() if row.over is None])


def undisturbed(groups: int) -> dict[str, Row]:
    world = World(groups)
    world.finish()
    return world.rows


EXPECTED = undisturbed(2)


@given(st.data())
def test_whatever_comes_between_nothing_is_lost_and_nothing_is_sampled_twice(data: st.DataObject) -> None:
    world = World(2)
    moves = ("ask", "take", "step", "step", "step", "again", "alive", "wait", "die", "restart", "lose")
    for move in data.draw(st.lists(st.sampled_from(moves), max_size=60)):
        names, places = list(world.rows), list(world.plays)
        if move == "ask":
            for name in data.draw(st.lists(st.sampled_from(names), max_size=8)):
                world.ask(name)
        elif move == "take":
            world.take()
        elif move in ("step", "again", "die") and places:
            place = data.draw(st.sampled_from(places))
            if move == "die":
                host = world.plays[place][0]
                world.plays = {at: one for at, one in world.plays.items() if one[0] != host}
            for _ in range({"step": 1, "again": 2, "die": 0}[move]):
                if place in world.plays:
                    world.step(place)
        elif move == "alive":
            world.alive()
        elif move == "wait":
            world.pass_time(data.draw(st.sampled_from([0.1, TIMEOUT_S / 2, TIMEOUT_S])))
        elif move == "restart":
            world.restart()
        elif move == "lose":
            world.loses += 1
    world.finish()
    for name, row in world.rows.items():
        assert row == replace(EXPECTED[name], over=row.over), "the same tokens, each sampled once"
        assert len(row.sampled) == len(set(row.sampled))
        over, wanted = row.over, EXPECTED[name].over
        assert over is not None and wanted is not None
        assert (over.reward, over.finish_reason, over.failure) == (wanted.reward, wanted.finish_reason, "")


def test_the_rows_of_the_game_have_branches() -> None:
    assert any(row.breaks for row in EXPECTED.values())
    assert {row.over.host for row in EXPECTED.values() if row.over} == {"h1", "h2"}


@pytest.fixture
def played() -> Iterator[tuple[World, str, Play]]:
    """A world in which one episode has come to its report."""
    world = World(1)
    for name in world.rows:
        world.ask(name)
    world.take()
    host, play = world.plays["g0", 0]
    while play.asks:
        for name in world.rows:
            world.ask(name)
        world.step(("g0", 0))
    for name in play.names:
        world.ask(name)
    yield world, host, play


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: changed(one, reward=math.nan), "the reward nan of"),
        (lambda one: changed(one, reward=1.5), "lies outside of [0, 1]"),
        (lambda one: changed(one, reward=math.inf), "lies outside of [0, 1]"),
        (lambda one: changed(one, branches=()), "that were recorded"),
        (lambda one: changed(one, branches=(*one.branches, (1,))), "was never recorded"),
    ],
)
def test_a_report_that_cannot_be_is_refused_and_its_episode_has_failed(
    played: tuple[World, str, Play], change: Any, words: str
) -> None:
    world, host, play = played
    first, *others = play.report()
    reason = world.sessions.report(host, "g0", 0, [change(first), *others], world.now)
    assert reason is not None and words in reason
    world.settle()
    for name in play.names:
        over = world.rows[name].over
        assert over is not None and over.finish_reason is FinishReason.FAILED and words in over.failure
    assert world.sessions.hosts[host].refused == 1 and world.sessions.hosts[host].reported == 0


@given(st.data())
def test_a_host_that_alters_one_token_is_always_found(data: st.DataObject) -> None:
    world = World(1)
    for name in world.rows:
        world.ask(name)
    world.take()
    host, play = world.plays["g0", 0]
    while play.asks:
        for name in world.rows:
            world.ask(name)
        world.step(("g0", 0))
    for name in play.names:
        world.ask(name)
    seats = play.report()
    seat = data.draw(st.integers(0, SEATS - 1))
    branches = [list(branch) for branch in seats[seat].branches]
    branch = data.draw(st.sampled_from(branches))
    place = data.draw(st.integers(0, len(branch) - 1))
    branch[place] = data.draw(st.integers(0, 999).filter(lambda token: token != branch[place]))
    seats[seat] = changed(seats[seat], branches=tuple(map(tuple, branches)))
    assert world.sessions.report(host, "g0", 0, seats, world.now)


def test_reports_that_are_no_ones_change_nothing(played: tuple[World, str, Play]) -> None:
    world, host, play = played
    report, seats = world.sessions.report, play.report()
    while world.now <= FORGET_S:  # then it is known that there is no such group
        for name in world.rows:
            world.ask(name)
        world.pass_time(TIMEOUT_S / 2)
    assert "is not held by other" in str(report("other", "g0", 0, seats, world.now))
    assert "is not held by" in str(report(host, "g9", 0, seats, world.now))
    assert "has other trajectories" in str(report(host, "g0", 1, seats, world.now))
    assert "has other trajectories" in str(report(host, "g0", 0, seats[::-1], world.now))
    assert "has other trajectories" in str(report(host, "g0", 7, seats, world.now))
    assert world.sessions.outbox == []
    assert report(host, "g0", 0, seats, world.now) == ""
    assert report(host, "g0", 0, seats, world.now) == ""
    world.settle()
    worse = [changed(one, reward=0.0, error="no") for one in seats]
    assert "was reported otherwise" in str(report(host, "g0", 0, worse, world.now))
    counts = world.sessions.hosts[host]
    assert (counts.taken, counts.reported, counts.failed, counts.refused) == (2, 1, 0, 5)


def test_an_error_of_the_host_is_a_failure_and_no_wrong_answer(played: tuple[World, str, Play]) -> None:
    world, host, play = played
    first, *others = play.report()
    seats = [changed(first, reward=math.nan, error="the game server is gone"), *others]
    assert world.sessions.report(host, "g0", 0, seats, world.now) == ""
    world.settle()
    overs = [world.rows[name].over for name in play.names]
    assert [(over.finish_reason, over.failure) for over in overs if over] == [
        (FinishReason.FAILED, f"host {host}: the game server is gone")
    ] * SEATS
    assert world.sessions.hosts[host].failed == 1


def test_a_silent_host_whose_episodes_cannot_be_built_again_fails_them() -> None:
    world = World(1)
    world.sessions = sessions_at(0.0, rebuildable=False)
    for name in world.rows:
        world.ask(name)
    world.take()
    world.step(("g0", 0))
    host = world.plays["g0", 0][0]
    world.plays.clear()
    world.pass_time(TIMEOUT_S)
    for name in world.rows:
        world.ask(name)
    overs = [row.over for row in world.rows.values()]
    assert all(over and over.finish_reason is FinishReason.FAILED for over in overs)
    assert world.sessions.take("h2", world.now) is None
    assert world.sessions.hosts[host].failed == 2 and world.sessions.hosts[host].lost == 0
    (play,) = ([SeatReport(trajectory=f"g0/{i}", reward=1.0) for i in range(SEATS)],)
    assert "silent for too long" in str(world.sessions.report(host, "g0", 0, play, world.now))


def test_a_group_that_a_worker_begins_again_is_played_again(played: tuple[World, str, Play]) -> None:
    world, host, play = played
    assert world.sessions.report(host, "g0", 0, play.report(), world.now) == ""
    world.settle()
    row = Row(play.names[0], lambda name, context: [400])
    row.hear(TurnAnswer("g0", 0, "", tuple(play.said(play.names[0])[0][:3])))
    world.sessions.asked(row.question(), world.now)
    assert not world.sessions.outbox, "what was reported is about another row"
    with pytest.raises(Refused, match="not held"):
        world.sessions.request(play.names[0], [1, 2, 3], world.now)
    taken = world.sessions.take("h2", world.now)
    assert taken is not None and [episode.episode for episode in taken.episodes] == [0, 1]


def test_a_gateway_that_starts_again_has_no_host_wait_for_what_is_over(
    played: tuple[World, str, Play],
) -> None:
    world, host, play = played
    assert world.sessions.report(host, "g0", 0, play.report(), world.now) == ""
    world.settle()
    world.restart()
    for name in world.rows:
        world.ask(name)
    assert world.sessions.report(host, "g0", 0, play.report(), world.now) == "", "its answer got lost"
    with pytest.raises(Refused, match="is over"):
        world.sessions.request(play.names[0], [1, 2, 3], world.now)
    world.pass_time(TIMEOUT_S)
    taken = world.sessions.take("h2", world.now)
    assert taken is not None and [episode.episode for episode in taken.episodes] == [1]


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize(
    ("more", "words", "reason"),
    [
        (990, "maximum context length is 3000", FinishReason.TOKENS),
        (1, r"environment\.max_turns=8", FinishReason.TURNS),
    ],
)
def test_a_context_beyond_the_limits_is_refused_and_the_report_ends_the_trajectory_so(
    more: int, words: str, reason: FinishReason, restarts: bool
) -> None:
    world = World(1)
    for name in world.rows:
        world.ask(name)
    world.sessions.take("h", 0.0)
    context = [1, 2]
    with pytest.raises(Refused, match=words) as refused:
        for _ in range(100):
            turn = world.sessions.request("g0/0", context, 0.0)
            world.settle()
            world.ask("g0/0")
            if turn is not None:
                context = [*context, *turn.token_ids.tolist(), *[3] * more]
    assert refused.value.status == 400
    limit = None
    if restarts:  # the host alone knows then
        limit = reason.value
        world.restart()
        for name in world.rows:
            world.ask(name)
    seats = [
        SeatReport(trajectory="g0/0", reward=0.5, branches=(tuple(world.rows["g0/0"].tokens),), limit=limit),
        SeatReport(trajectory="g0/1", reward=0.25, branches=()),
    ]
    assert world.sessions.report("h", "g0", 0, seats, 0.0) == ""
    world.settle()
    over, unasked = world.rows["g0/0"].over, world.rows["g0/1"].over
    assert over is not None and (over.finish_reason, over.reward) == (reason, 0.5)
    assert unasked is not None and unasked.failure == "it ended before anything was sampled"


@pytest.mark.parametrize("limit", [None, "turns", "tokens"])
def test_an_agent_that_shortens_its_context_ends_as_any_other_whatever_its_host_says(
    limit: Literal["turns", "tokens"] | None,
) -> None:
    world = World(1)
    for name in world.rows:
        world.ask(name)
    world.sessions.take("h", 0.0)
    with pytest.raises(Refused, match="maximum context length"):
        world.sessions.request("g0/0", [1] * 3000, 0.0)
    for name in ("g0/0", "g0/1"):
        assert world.sessions.request(name, [1], 0.0) is None
        world.settle()
        world.ask(name)
    seats = [
        SeatReport(trajectory=name, reward=1.0, branches=(tuple(world.rows[name].tokens),), limit=limit)
        for name in ("g0/0", "g0/1")
    ]
    assert world.sessions.report("h", "g0", 0, seats, 0.0) == ""
    world.settle()
    over = world.rows["g0/0"].over
    assert over is not None and over.finish_reason is FinishReason.ENVIRONMENT


def test_a_host_keeps_what_it_has_while_the_gateway_starts_again() -> None:
    world = World(1)
    for name in world.rows:
        world.ask(name)
    world.take()
    for _ in range(2):
        for place in list(world.plays):
            world.step(place)
            for name in world.rows:
                world.ask(name)
    world.restart()
    for name in reversed(world.rows):  # those that have not begun are asked about first
        world.ask(name)
    assert world.sessions.take("h2", world.now) is None
    assert world.sessions.alive("h1", ["g0"], world.now) == (["g0"], [])
    assert world.sessions.alive("h2", ["g0"], world.now) == ([], ["g0"])
    assert world.sessions.untaken == 0


def test_what_is_no_request_of_a_trajectory_is_refused_in_a_sentence() -> None:
    world = World(1)
    world.ask("g0/0")
    with pytest.raises(Refused, match="take it first"):
        world.sessions.request("g0/0", [1], 0.0)
    world.take()
    assert world.sessions.request("g0/1", [1], 0.0) is None, "its worker has not asked yet"
    assert world.sessions.request("g7/0", [1], 0.0) is None, "it may have begun before this process"
    for name, context, words in (
        ("g7/0", [1], "there is no trajectory 'g7/0'"),
        ("g0/4", [1], "there is no trajectory 'g0/4'"),
        ("g0/00", [1], "there is no trajectory"),
        ("g0/\u00b2", [1], "there is no trajectory"),
        ("g0/0", [], "is empty"),
        ("g0/0", [1000], "vocabulary of 1000"),
    ):
        world.now = FORGET_S - 1 if name.startswith("g0") else FORGET_S + 1
        world.ask("g0/0")
        with pytest.raises(Refused, match=words):
            world.sessions.request(name, context, world.now)
        world.now = 0.0


def test_a_key_of_another_environment_is_no_group() -> None:
    question = Row("g0/0", says).question()
    with pytest.raises(ContractError, match=r"environment\.seed"):
        sessions_at(0.0).asked(replace(question, prompt_key="train-9-0"), 0.0)


def test_a_group_that_begins_again_with_other_tokens_meets_no_verdict_of_the_old_ones(
    played: tuple[World, str, Play],
) -> None:
    world, host, play = played
    world.loses = 1
    assert world.sessions.report(host, "g0", 0, play.report(), world.now) == ""
    world.settle()
    name = play.names[0]
    start, stop = world.rows[name].observed[0]
    opening = TurnAnswer("g0", 0, "", tuple(world.rows[name].tokens[start:stop]))
    world.rows[name] = Row(name, lambda name, context: [499, *says(name, context)])
    world.rows[name].hear(opening)
    world.sessions.asked(world.rows[name].question(), world.now)
    assert world.sessions.outbox == [], "the report was about other tokens"
    assert world.sessions.alive(host, ["g0"], world.now) == ([], ["g0"])
    assert "is not held by" in str(world.sessions.report(host, "g0", 0, play.report(), world.now))
    taken = world.sessions.take("h2", world.now)
    assert taken is not None and [one.episode for one in taken.episodes] == [0, 1]
    with pytest.raises(Refused, match="was taken by another host"):
        world.sessions.request(play.called(name), [1, 2], world.now)


def test_an_episode_of_which_the_gateway_lost_an_end_gets_it_when_its_host_reports_again(
    half_over: tuple[World, str, Play],
) -> None:
    world, _, play = half_over
    assert world.rows["g0/1"].over is None
    assert world.sessions.report("other", "g0", 0, play.report(), world.now) == ""
    world.settle()
    over = world.rows["g0/1"].over
    assert over is not None and (over.reward, over.failure) == (play.report()[1].reward, "")
    assert world.sessions.hosts["other"].reported == 1, "no process before has counted it"


def test_an_episode_is_counted_once_though_its_host_reports_it_to_two_gateways(
    played: tuple[World, str, Play],
) -> None:
    world, host, play = played
    counts, world.loses = world.sessions.hosts, 1
    assert world.sessions.report(host, "g0", 0, play.report(), world.now) == ""
    world.settle()  # the gateway dies before the coordinator hears
    assert counts[host].reported == 0
    world.restart()
    world.sessions.hosts = counts
    for name in play.names:
        world.ask(name)
    assert world.sessions.report(host, "g0", 0, play.report(), world.now) == ""
    world.settle()
    assert counts[host].reported == 1
    for _ in range(2):
        world.ask(play.names[0])
    assert counts[host].reported == 1


def test_a_seat_that_is_left_of_an_episode_is_compared_with_its_row(
    half_over: tuple[World, str, Play],
) -> None:
    world, host, play = half_over
    seats = play.report()
    seats[1] = changed(seats[1], branches=())
    assert "that were recorded" in str(world.sessions.report(host, "g0", 0, seats, world.now))
    world.settle()
    over = world.rows["g0/1"].over
    assert over is not None and over.finish_reason is FinishReason.FAILED


def test_seats_that_are_left_of_an_episode_fail_once_its_host_is_gone_too(
    half_over: tuple[World, str, Play],
) -> None:
    world, _, _ = half_over
    world.pass_time(TIMEOUT_S)
    over = world.rows["g0/1"].over
    assert over is not None and over.finish_reason is FinishReason.FAILED and "this episode's" in over.failure
    assert world.sessions.hosts[UNKNOWN].failed == 1
    taken = world.sessions.take("h2", world.now)
    assert taken is not None and [one.episode for one in taken.episodes] == [1]


def test_they_are_counted_for_the_host_that_was_heard_last(half_over: tuple[World, str, Play]) -> None:
    world, host, _ = half_over
    assert world.sessions.alive(host, ["g0"], world.now) == (["g0"], [])
    world.pass_time(TIMEOUT_S)
    counts = world.sessions.hosts[host]
    assert (counts.failed, counts.lost) == (1, 1)  # the other episode is given to another host


@pytest.fixture
def half_over(played: tuple[World, str, Play]) -> tuple[World, str, Play]:
    """A world whose gateway began anew when the end of one seat was journalled, and of the other was not."""
    world, host, play = played
    assert world.sessions.report(host, "g0", 0, play.report(), world.now) == ""
    world.sessions.outbox = [one for one in world.sessions.outbox if one.sample_index == 0]
    world.settle()
    world.restart()
    for name in world.rows:
        world.ask(name)
    return world, host, play


def test_a_host_that_wakes_after_its_group_was_given_away_is_told_so() -> None:
    world = World(1)
    for name in world.rows:
        world.ask(name)
    first = world.sessions.take("h", world.now)
    world.now += TIMEOUT_S
    second = world.sessions.take("h", world.now)  # of the same name, such as one that was started again
    assert first is not None and second is not None
    (old, *_), (new, *_) = (one.episodes[0].trajectories for one in (first, second))
    assert old.partition("@")[0] == new.partition("@")[0] == "g0/0"
    with pytest.raises(Refused, match="was taken by another host"):
        world.sessions.request(old, [1], world.now)
    seats = [SeatReport(trajectory=one, error="no") for one in first.episodes[0].trajectories]
    assert "is not held by" in str(world.sessions.report("h", "g0", 0, seats, world.now))
    assert world.sessions.request(new, [1], world.now) is None
    world.settle()
    world.restart()
    world.ask("g0/0")
    turn = world.sessions.request(new, [1], world.now)
    assert turn is not None and turn.token_ids.tolist() == says("g0/0", [1])
    with pytest.raises(Refused, match="was taken by another host"):
        world.sessions.request(old, [1], world.now)


def test_a_turn_that_takes_long_loses_no_host_while_the_coordinator_waits_for_its_group() -> None:
    world = World(1)
    for name in world.rows:
        world.ask(name)
    taken = world.sessions.take("h", world.now)
    assert taken is not None
    name = taken.episodes[0].trajectories[0]
    assert world.sessions.request(name, [1], world.now) is None
    while world.now < 3 * FORGET_S:  # nobody asks: it is being sampled, and the host waits in its request
        world.now += TIMEOUT_S / 2
        world.sessions.unfinished(["g0", "g9"], world.now)
        assert world.sessions.request(name, [1], world.now) is None
        assert world.sessions.alive("h", ["g9"], world.now) == ([], []), "its worker may have begun nothing"
    assert world.sessions.take("h2", world.now) is None
    world.now += FORGET_S + 1  # it was handed in, or given up
    world.sessions.unfinished([], world.now)
    world.sessions.tick(world.now)
    with pytest.raises(Refused, match="there is no trajectory"):
        world.sessions.request(name, [1], world.now)
    assert world.sessions.alive("h", ["g9"], world.now) == ([], ["g9"])


def test_a_host_that_waits_in_a_request_is_alive_while_no_worker_asks() -> None:
    world = World(1)
    for name in world.rows:
        world.ask(name)
    taken = world.sessions.take("h", world.now)
    assert taken is not None
    world.restart()
    world.ask("g0/1")  # another seat's worker
    name = taken.episodes[0].trajectories[0]
    assert world.sessions.take("h", world.now) is not None
    name = f"{name.partition('@')[0]}"
    for _ in range(4):
        world.now += TIMEOUT_S / 2
        assert world.sessions.request(name, [1], world.now) is None
    assert world.sessions.take("h2", world.now) is None


def test_the_newest_hosts_are_remembered() -> None:
    sessions = sessions_at(0.0)
    for number in range(HOSTS_KEPT + 10):
        sessions.alive(f"h{number}", [], 0.0)
        sessions.alive("h0", [], 0.0)
    assert len(sessions.hosts) == HOSTS_KEPT and "h0" in sessions.hosts and "h10" not in sessions.hosts


def test_what_a_host_says_of_a_failure_is_cut_to_a_line(played: tuple[World, str, Play]) -> None:
    world, host, play = played
    seats = [changed(one, error="gone\n" * (1 << 20)) for one in play.report()]
    assert world.sessions.report(host, "g0", 0, seats, world.now) == ""
    assert all(len(one.failure) < 1000 and "\n" not in one.failure for one in world.sessions.outbox)
