"""Report: what simulated runs came to, for people and for programs.

A seed that found something is printed with what it found, what went wrong before, and the command
that shows it again.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from antiphon.simulator.faults import Fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one simulated run came to."""

    seed: int
    violations: tuple[str, ...]
    digest: str
    """blake3 of the journal; the same seed gives the same."""
    weights: tuple[str, ...]
    """Weights digest of each committed step."""
    batches: tuple[str, ...]
    """Digest of each sealed batch."""
    events: int
    """Events of the journal."""
    steps: int
    """Callbacks of the event loop."""
    messages: int
    virtual_s: float
    faults: tuple[Fault, ...]
    restarts: int
    recovery_s: float | None
    """Seconds from the last fault to the next commit; None when nothing was left to commit."""
    parties: tuple[str, ...]
    """Kinds of processes and people that took part."""
    shut_out: tuple[str, ...]
    """Workers that ended in quarantine."""
    edited: int
    """Groups that trained with a token that a worker had changed and no audit had found yet."""


SHOWN = 6
"""Violations of one seed that are printed; the first one is usually the cause of the others."""


@dataclasses.dataclass(slots=True)
class Summary:
    """Totals over the outcomes so far."""

    seeds: int = 0
    failing: list[int] = dataclasses.field(default_factory=list)
    """Seeds with violations."""
    violations: int = 0
    events: int = 0
    messages: int = 0
    faults: int = 0
    restarts: int = 0
    virtual_s: float = 0.0
    slowest_recovery_s: float = 0.0
    """Longest time from the last fault of a run to its next commit, virtual seconds."""
    parties: dict[str, int] = dataclasses.field(default_factory=dict)
    """Kind of party -> runs that it took part in."""
    shut_out: int = 0
    """Workers that ended in quarantine."""
    edited: int = 0
    """Groups that trained with a token that a worker had changed and no audit had found yet."""

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        if outcome.violations:
            self.failing.append(outcome.seed)
        self.violations += len(outcome.violations)
        self.events += outcome.events
        self.messages += outcome.messages
        self.faults += len(outcome.faults)
        self.restarts += outcome.restarts
        self.virtual_s += outcome.virtual_s
        for party in outcome.parties:
            self.parties[party] = self.parties.get(party, 0) + 1
        self.shut_out += len(outcome.shut_out)
        self.edited += outcome.edited
        self.slowest_recovery_s = max(self.slowest_recovery_s, outcome.recovery_s or 0.0)

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        found = [
            f"{self.seeds} seeds, {self.faults} faults, {self.restarts} restarts, {self.events} events, "
            f"{self.messages} messages, {self.virtual_s / 3600:.1f} virtual hours",
            f"slowest recovery after the last fault: {self.slowest_recovery_s:.1f} virtual seconds",
            f"runs with each party: {_counts(self.parties)}; "
            f"{self.shut_out} liars shut out, {self.edited} groups trained with a changed token before",
            f"{self.violations} violations",
        ]
        if self.failing:
            found.append(f"failing seeds: {', '.join(map(str, self.failing))}")
        return found


def _counts(parties: dict[str, int]) -> str:
    return ", ".join(f"{name} {runs}" for name, runs in sorted(parties.items()))


def command_for(seed: int, scenario: str) -> str:
    """Return the command that shows a seed again.

    >>> command_for(17, "")
    'antiphon simulate --seed 17'
    """
    return f"antiphon simulate {scenario} --seed {seed}".replace("  ", " ")


def failure_lines(outcome: Outcome, scenario: str) -> list[str]:
    """Return what a failing seed found and how to see it again."""
    found = [f"seed {outcome.seed}: {len(outcome.violations)} violations"]
    found += [f"  {sentence}" for sentence in outcome.violations[:SHOWN]]
    found += [f"  fault at {fault}" for fault in outcome.faults]
    found.append(f"  again: {command_for(outcome.seed, scenario)}")
    return found


def outcome_lines(outcome: Outcome) -> list[str]:
    """Return one run as lines of text."""
    found = [f"fault at {fault}" for fault in outcome.faults]
    recovery = (
        "" if outcome.recovery_s is None else f", {outcome.recovery_s:.1f} s after the last fault the next"
    )
    found.append(
        f"{len(outcome.weights)} steps committed{recovery}; {outcome.events} events, {outcome.messages} "
        f"messages, {outcome.restarts} restarts, over at {outcome.virtual_s:.1f} virtual seconds"
    )
    found.append(f"journal digest {outcome.digest}")
    return found
