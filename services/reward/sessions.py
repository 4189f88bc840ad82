"""Sessions: what hosts of others' environments are told, decided from the rows that are known here.

A question of a worker ("my turn has ended") is answered by the host's next request: what its tokens have
beyond the row is observed. A request whose tokens a recorded turn was sampled after gets that turn again, so
a host may ask twice, and one that begins an episode again comes to where the last one was. Everything else
begins a branch. Nothing here is durable: after a restart the coordinator asks again, and hosts say what they
hold.

T tokens of a row; times are seconds of the caller's clock.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from antiphon.core.checks import failure_line
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, FloatArray, IntArray, TurnAnswer, TurnToAnswer, VersionSpan
from antiphon.core.seeds import conversation_seed
from antiphon.core.spans import clipped, shifted, turns_of
from antiphon.environments.host import HostEnvironment
from antiphon.lineage.hosts import HostCounts

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
OVER_BEFORE = 0.0, ""
"""Verdict of a trajectory that was over before this process began: the coordinator has the true one."""
HOSTS_KEPT = 1024
"""Hosts of which counts are kept; those that were silent longest are forgotten."""
UNKNOWN = "(not heard since the gateway began again)"
"""For whom episodes are counted whose host is not known."""


class Refused(ContractError):
    """A request of a host that is not answered: why, in a sentence, with its HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn as a host is told it, [T] tokens."""

    token_ids: IntArray
    logprobs: FloatArray
    spans: tuple[VersionSpan, ...]
    """Counted from the turn's first token."""


class SeatReport(BaseModel):
    """What a host says of one trajectory of an episode."""

    model_config = ConfigDict(frozen=True)

    trajectory: str
    reward: float = math.nan
    error: str | None = None
    """Why there is no reward."""
    branches: tuple[tuple[TokenId, ...], ...] = ()
    """Of each context that was used the tokens up to its end."""
    limit: Literal["turns", "tokens"] | None = None
    """The limit of the run that ended it, as the host was told, perhaps by a gateway before this one; it
    counts where the row is near it."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of a host's environment, with a trajectory for each seat."""

    episode: int
    seed: int
    trajectories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """A group as a host takes it."""

    group: str
    key: str
    split: str
    index: int
    episodes: tuple[Episode, ...]
    """Those that nobody reported; "@" and the number of the take stand behind the trajectories' names."""


@dataclass(slots=True)
class Trajectory:
    """What is known of one trajectory."""

    name: str
    split: str
    known: TurnToAnswer | None = None
    """The newest question: the row so far."""
    answers: dict[str, TurnAnswer] = field(default_factory=dict)
    """By the digest of the row: a question may come again."""
    limit: FinishReason | None = None
    """Which of the run's limits a request went beyond."""
    verdict: tuple[float, str] | None = None
    """Reward and failure, once they are said."""
    journalled: bool = False
    """The coordinator has its end from this process."""

    @property
    def open(self) -> bool:
        return self.known is not None and self.known.row_digest not in self.answers

    @property
    def over_before(self) -> bool:
        return self.known is None and self.verdict == OVER_BEFORE

    def recorded(self, context: Sequence[int] | IntArray) -> SampledTurn | None:
        """Return the turn that was sampled after a context; None where there is none."""
        if (known := self.known) is None:
            return None
        context = np.asarray(context, dtype=np.int32)
        for start, stop in turns_of(known):
            begin = max((place for place in known.breaks if place <= start), default=0)
            if start - begin == context.size and np.array_equal(known.token_ids[begin:start], context):
                said = shifted(clipped(known.spans, start, stop), -start)
                return SampledTurn(known.token_ids[start:stop], known.logprobs[start:stop], said)
        return None

    def followed_by(self, context: Sequence[int] | IntArray) -> bool:
        """Return whether a context goes on from the row's last one."""
        assert self.known is not None, "the row is known"
        last = self.known.token_ids[max(self.known.breaks, default=0) :]
        return last.size < len(context) and np.array_equal(context[: last.size], last)


@dataclass(slots=True)
class _Group:
    """The samples of one prompt, which one host has at a time."""

    whole: Taken
    """As the first host takes it, but for the number of the take."""
    samples: tuple[Trajectory, ...]
    heard_s: float
    """When the coordinator last asked about it, or said that it waits for it."""
    deadline_s: float = math.inf
    """When `host`, or who may still say that it has the group, loses it."""
    host: str = ""
    awaited: bool = False
    """It had begun before this process, and its host may still say that it has it."""
    waited_for: bool = False
    """It was `awaited` once; that is over after `deadline_s`."""
    take: str = ""
    """Number of the newest take; empty where that was not heard since this process began."""
    reports: dict[int, tuple[tuple[SeatReport, ...], str]] = field(default_factory=dict)
    """By episode: what was reported, and why it was refused."""

    @property
    def over(self) -> bool:
        return all(session.verdict is not None for session in self.samples)

    @property
    def free(self) -> bool:
        return not (self.host or self.awaited or self.over)

    @property
    def unreported(self) -> tuple[Episode, ...]:
        seats = len(self.samples) // len(self.whole.episodes)
        left = {index // seats for index, session in enumerate(self.samples) if session.verdict is None}
        return tuple(one for one in self.whole.episodes if one.episode in left)

    def held_by(self, host: str) -> bool:
        return self.host == host or self.awaited


class Sessions:
    """The trajectories of hosted groups."""

    def __init__(
        self,
        environment: HostEnvironment,
        group_sizes: dict[str, int],
        *,
        vocabulary: int,
        max_tokens: int,
        host_timeout_s: float,
        forget_s: float,
        now: float,
    ) -> None:
        """Begin with none.

        Args:
            environment: what the configuration says of it.
            group_sizes: samples of a group by split.
            vocabulary: every token id is smaller.
            max_tokens: of a turn.
            host_timeout_s: longest silence of a host; then it loses its groups.
            forget_s: after this without a word of the coordinator a group is forgotten.
            now: the time.
        """
        self._environment, self._sizes = environment, group_sizes
        self._vocabulary, self._max_tokens, self._host_timeout_s = vocabulary, max_tokens, host_timeout_s
        self._forget_s, self._begun_s = forget_s, now
        self._takes = int(now * 1000)  # those of processes before this one have smaller numbers
        self._groups: dict[str, _Group] = {}
        self._unfinished: frozenset[str] = frozenset()
        self.outbox: list[TurnAnswer] = []
        """Answers for the coordinator; who reads them empties it."""
        self.hosts: dict[str, HostCounts] = {}
        self.heard: set[str] = set()
        """Hosts that were heard since this was emptied."""

    @property
    def untaken(self) -> int:
        """Return how many groups no host has."""
        return sum(group.free for group in self._groups.values())

    def asked(self, question: TurnToAnswer, now: float) -> None:
        """Take a question; it may come again, with its answer known or not."""
        group = self._groups.get(question.group_id)
        if group is None:
            group = self._groups[question.group_id] = self._group(question, now)
        group.heard_s = now
        session = group.samples[question.sample_index]
        answer = session.answers.get(question.row_digest)
        if answer is not None:
            self.outbox.append(answer)
            return
        before = None if session.known is None else session.known.token_ids
        if before is not None and not np.array_equal(question.token_ids[: before.size], before):
            # It began again with other tokens, which its host has not seen: another one takes it.
            if group.host:
                self.hosts.get(group.host, HostCounts()).lost += len(group.unreported)
            group = self._groups[question.group_id] = self._group(question, now)
            group.waited_for, session = True, group.samples[question.sample_index]
        begun = question.token_ids.size or question.over
        if begun and not group.take and not group.waited_for:
            group.awaited = group.waited_for = True
            group.deadline_s = now + self._host_timeout_s
        for sample in question.over:
            if group.samples[sample].known is None:
                group.samples[sample].verdict = OVER_BEFORE
        if session.over_before:
            session.verdict = None  # its group began again
        session.known = question
        self._end_if_said(group, session)

    def unfinished(self, group_ids: Iterable[str], now: float) -> None:
        """Hear which groups the coordinator waits for, also those whose turns take long to be sampled."""
        self._unfinished = frozenset(group_ids)
        for group_id in self._unfinished & self._groups.keys():
            self._groups[group_id].heard_s = now

    def take(self, host: str, now: float) -> Taken | None:
        """Give a host the group that waits longest; None where none waits."""
        self.tick(now)
        counts = self._counts(host)
        group = next((group for group in self._groups.values() if group.free), None)
        if group is None:
            return None
        self._takes += 1
        group.host, group.deadline_s, group.take = host, now + self._host_timeout_s, str(self._takes)
        left = tuple(
            replace(one, trajectories=tuple(f"{name}@{group.take}" for name in one.trajectories))
            for one in group.unreported
        )
        counts.taken += len(left)
        return replace(group.whole, episodes=left)

    def alive(self, host: str, groups: Sequence[str], now: float) -> tuple[list[str], list[str]]:
        """Note that a host lives; return which of these groups it has, and which it lost."""
        self.tick(now)
        self._counts(host)
        held = []
        for group_id in dict.fromkeys(groups):
            group = self._groups.get(group_id)
            if group is not None and group.held_by(host) and not group.over:
                group.host, group.awaited = host, False
                group.deadline_s = now + self._host_timeout_s
                held.append(group_id)
        rest = {*groups} - {*held}
        return held, [one for one in groups if one in rest and not self._unheard(one, now)]

    def held(self) -> list[Trajectory]:
        """Return the trajectories that hosts have and that are not over."""
        samples = (one for group in self._groups.values() if group.host for one in group.samples)
        return [one for one in samples if one.verdict is None]

    def holder(self, name: str) -> str:
        """Return the host that has a trajectory, "" where none is known to."""
        group = self._groups.get(name.partition("@")[0].rpartition("/")[0])
        return "" if group is None else group.host

    def find(self, name: str, now: float) -> Trajectory | None:
        """Return a trajectory, by its name with or without the take; None while its group may still be
        asked about.

        Raises:
            Refused: when there is none of that name, no host has it, or it was taken again since.
        """
        place, _, take = name.partition("@")
        group_id, _, sample = place.rpartition("/")
        group = self._groups.get(group_id)
        found = [one for one in group.samples if one.name == place] if group is not None else []
        if group is not None and found:
            if not group.host and not group.awaited:
                raise Refused(409, f"group {group_id} is not held by a host; take it first")
            group.take = group.take or take
            if take not in ("", group.take):
                raise Refused(409, f"group {group_id} was taken by another host meanwhile; take another")
            return found[0]
        if group_id and sample.isdecimal() and self._unheard(group_id, now):
            return None
        raise Refused(409, f"there is no trajectory {name[:80]!r}; its group is over, or was never given")

    def too_long(self, name: str) -> None:
        """Hear that a request for a trajectory was refused before it was made tokens of."""
        for session in self.held():
            if session.name == name.partition("@")[0]:
                session.limit = FinishReason.TOKENS

    def request(self, name: str, context: Sequence[int] | IntArray, now: float) -> SampledTurn | None:
        """Return the turn that was sampled after `context`; None: it is being sampled, ask again later.

        Raises:
            Refused: when there will be none.
        """
        session, tokens = self.find(name, now), np.asarray(context, dtype=np.int32)
        if not tokens.size:
            raise Refused(400, f"token_ids of {name} is empty; send the whole context")
        if session is None:
            return None
        group = self._groups[session.name.rpartition("/")[0]]
        group.deadline_s = now + self._host_timeout_s  # who waits for an answer is alive
        if session.known is None:
            if session.verdict is None:
                return None
            raise Refused(409, f"trajectory {name} is over; take a group")
        if (turn := session.recorded(tokens)) is not None:
            return turn
        if session.verdict is not None:
            raise Refused(409, f"trajectory {name} is over; ask for turns that it has, or take a group")
        if session.open:
            self._answer(group, session, session.known, tokens)
        return None

    def report(
        self, host: str, group_id: str, episode: int, seats: Sequence[SeatReport], now: float
    ) -> str | None:
        """Take what a host reports of an episode; return why it is refused, "" where it counts.

        None: one of its turns is being sampled, so that it cannot be compared yet; ask again later.
        """
        self.tick(now)
        counts, group = self._counts(host), self._groups.get(group_id)

        def refuse(reason: str) -> str:
            counts.refused += 1
            return reason

        if self._unheard(group_id, now):
            return None
        where, told = f"episode {episode} of group {group_id}", [s.trajectory.partition("@") for s in seats]
        takes = {take for _, _, take in told} - {""}
        if group is None or not group.held_by(host) or (group.take and takes - {group.take}):
            return refuse(f"group {group_id[:80]} is not held by {host}; report what you took")
        names = tuple(name for name, _, _ in told)
        if [names] != [one.trajectories for one in group.whole.episodes if one.episode == episode]:
            return refuse(f"{where} has other trajectories; report each seat in order")
        group.host, group.awaited, group.deadline_s = host, False, now + self._host_timeout_s
        if episode in group.reports:
            before, reason = group.reports[episode]
            return reason if before == tuple(seats) else refuse(f"{where} was reported otherwise before")
        sessions = [one for one in group.samples if one.name in names]
        # What was over before this process was reported then.
        left = [one for one in zip(seats, sessions, strict=True) if not one[1].over_before]
        if not left:
            return ""
        if any(session.verdict is not None for _, session in left):
            return refuse(f"{where} failed: its host was silent for too long")
        failure = next((failure_line(f"host {host}: {seat.error}") for seat in seats if seat.error), "")
        if not failure and not all(session.open for _, session in left):
            return None
        reason = "" if failure else next(filter(None, (self._problem(*one) for one in left)), "")
        if reason:
            refuse(reason)
        group.reports[episode] = tuple(seats), reason
        said = f"host {host}: {reason}" if reason else failure
        for seat, session in left:
            session.verdict = 0.0 if said else seat.reward, said
            if seat.limit is not None and self._near(seat.limit, session.known):
                session.limit = FinishReason(seat.limit)
            self._end_if_said(group, session)
        return reason

    def journalled(self, answer: TurnAnswer) -> None:
        """Hear that the coordinator has an answer: a report counts for its host once all its ends are there.

        A host whose gateway dies before that reports again, to the next one.
        """
        group, seats = self._groups.get(answer.group_id), self._environment.seats
        if group is None or answer.finish_reason is None:
            return
        session, episode = group.samples[answer.sample_index], answer.sample_index // seats
        if session.journalled or answer.row_digest not in session.answers:  # or it began again since
            return
        session.journalled = True
        sessions = group.samples[episode * seats : (episode + 1) * seats]
        _, reason = group.reports.get(episode, ((), "it has failed"))
        if not reason and all(one.journalled or one.over_before for one in sessions):
            counts = self.hosts.setdefault(answer.host or UNKNOWN, HostCounts())
            failed = any(one.verdict is not None and one.verdict[1] for one in sessions)
            counts.failed += failed
            counts.reported += not failed

    def tick(self, now: float) -> None:
        """Take groups from hosts that were silent for too long, and forget those that nobody asks about."""
        for group_id, group in list(self._groups.items()):
            if now - group.heard_s > self._forget_s:
                del self._groups[group_id]
                continue
            if group.deadline_s <= now and not group.over:
                self._lose(group)
            if group.free:
                self._end_halves(group)

    def _lose(self, group: _Group) -> None:
        silent, left = group.host or "its host", len(group.unreported)
        counts = self.hosts.get(group.host, HostCounts())
        group.deadline_s, group.awaited = math.inf, False
        if self._environment.rebuildable:
            self._end_halves(group)
            counts.lost += len(group.unreported)
            group.host = ""
            return
        counts.failed += left
        said = f"{silent} was silent for {self._host_timeout_s:g} s, and its episodes cannot be built again"
        self._end_all(group, group.samples, said)

    def _end_halves(self, group: _Group) -> None:
        """End the episodes of which seats were over before this process: no other host can play the rest."""
        for episode in group.unreported:
            sessions = [one for one in group.samples if one.name in episode.trajectories]
            if any(one.over_before for one in sessions):
                self.hosts.setdefault(group.host or UNKNOWN, HostCounts()).failed += 1
                said = "the gateway and its host ended between the ends of this episode's seats"
                self._end_all(group, sessions, said)

    def _end_all(self, group: _Group, sessions: Iterable[Trajectory], failure: str) -> None:
        """Say of those that are not over that they have failed."""
        for session in sessions:
            if session.verdict is None:
                session.verdict = 0.0, failure
                self._end_if_said(group, session)

    def _counts(self, host: str) -> HostCounts:
        self.heard.add(host)
        self.hosts[host] = self.hosts.pop(host, HostCounts())  # the newest one is the last
        while len(self.hosts) > HOSTS_KEPT:
            del self.hosts[next(iter(self.hosts))]
        return self.hosts[host]

    def _group(self, question: TurnToAnswer, now: float) -> _Group:
        split, index = self._environment.place_of(question.prompt_key)
        samples, seats = self._sizes[split], self._environment.seats
        seed = conversation_seed(self._environment.seed, question.prompt_key)
        names = [f"{question.group_id}/{sample}" for sample in range(samples)]
        starts = range(0, samples, seats)
        episodes = (Episode(at // seats, seed, tuple(names[at : at + seats])) for at in starts)
        whole = Taken(question.group_id, question.prompt_key, split, index, tuple(episodes))
        return _Group(whole, tuple(Trajectory(name, split) for name in names), heard_s=now)

    def _unheard(self, group_id: str, now: float) -> bool:
        """Return whether a group is not known that may have begun before this process."""
        may_have_begun = now - self._begun_s < self._forget_s or group_id in self._unfinished
        return group_id not in self._groups and may_have_begun

    def _answer(self, group: _Group, session: Trajectory, known: TurnToAnswer, tokens: IntArray) -> None:
        name = session.name
        if int(tokens.max()) >= self._vocabulary or int(tokens.min()) < 0:
            raise Refused(400, f"{name}: an id of token_ids is not in the vocabulary of {self._vocabulary}")
        row, follows = known.token_ids, session.followed_by(tokens)
        new = tokens[row.size - max(known.breaks, default=0) :] if follows else tokens
        if len(known.observed) >= known.limits.turns:  # each turn stands behind what it answers
            session.limit = FinishReason.TURNS
            raise Refused(
                400, f"trajectory {name} has its environment.max_turns={known.limits.turns} turns; report it"
            )
        breaks = known.breaks if follows or not row.size else (*known.breaks, row.size)
        if row.size + new.size >= known.limits.longest(breaks):
            session.limit = FinishReason.TOKENS
            raise Refused(
                400,
                f"{tokens.size} tokens leave {name} no room: the maximum context length is "
                f"{known.limits.context} tokens, {known.limits.tokens} in all; report it",
            )
        session.limit = None
        self._say(group, session, tuple(new.tolist()), fresh=breaks != known.breaks)

    def _end_if_said(self, group: _Group, session: Trajectory) -> None:
        if session.known is None or not session.open or session.verdict is None:
            return
        reward, failure = session.verdict
        if not session.known.token_ids.size:
            failure = failure or "it ended before anything was sampled"
        reason = FinishReason.FAILED if failure else session.limit or FinishReason.ENVIRONMENT
        self._say(group, session, (), finish_reason=reason, reward=reward, failure=failure)

    def _say(self, group: _Group, session: Trajectory, token_ids: tuple[int, ...], **more: Any) -> None:
        """Answer the open question of a trajectory; `more` are fields of the answer."""
        known = session.known
        assert known is not None, "there is a question"
        answer = TurnAnswer(
            known.group_id, known.sample_index, known.row_digest, token_ids, host=group.host, **more
        )
        session.answers[known.row_digest] = answer
        self.outbox.append(answer)

    def _near(self, limit: str, known: TurnToAnswer | None) -> bool:
        """Return whether a row is where a request can have gone beyond a limit, as its host says.

        What that request had is not known after a restart: of tokens a whole turn must no longer fit.
        """
        if known is None:
            return False
        if limit == FinishReason.TURNS:
            return len(known.observed) >= known.limits.turns
        return known.token_ids.size + self._max_tokens >= known.limits.longest(known.breaks)

    def _problem(self, seat: SeatReport, session: Trajectory) -> str:
        """Say why a report of a trajectory that waits for its end is not believed; "" where it is."""
        name, (low, high) = seat.trajectory, self._environment.reward_range
        if not low <= seat.reward <= high:  # NaN is neither
            return f"the reward {seat.reward} of {name} lies outside of [{low:g}, {high:g}]"
        known = session.known
        assert known is not None, "it waits"
        bounds = [0, *known.breaks, known.token_ids.size]
        rows = [known.token_ids[a:b] for a, b in pairwise(bounds) if a < b]
        said = [np.asarray(branch, dtype=np.int64) for branch in seat.branches]
        for row in rows:
            if not any(np.array_equal(branch[: row.size], row) for branch in said):
                return f"no branch in the report of {name} has the {row.size} tokens that were recorded"
        for branch in said:
            if not any(np.array_equal(branch[: row.size], row) for row in rows):
                return f"a branch in the report of {name} with {branch.size} tokens was never recorded"
        return ""
