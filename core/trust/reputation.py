"""Reputation: how much of a worker's work is looked at again, and when it is shut out.

A worker starts as a stranger: a quarter of its groups are audited. Each group that passes makes
the share smaller, down to two in a hundred, and one doubt puts it back to the beginning. Three
strikes, or one proof, and it is in quarantine: no leases, nothing taken in, until someone pardons
it. Everything is a fold of journal events, so it outlives a restart.
"""

import math
from dataclasses import dataclass, replace

from antiphon.core.trust.audit import Sums

FIRST_SHARE = 0.25
"""Share of a new worker's groups that are audited."""
LAST_SHARE = 0.02
"""Share of a proven worker's groups that are audited; never less, or there is nothing to fear."""
HALVING = 8
"""Groups that pass before the share above the last one has halved."""
STRIKES = 3
"""Strikes that make a quarantine."""
FORGIVEN_AFTER = 50
"""Audited groups that pass in a row before the strikes are forgotten."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a worker, by name."""

    passed: int = 0
    """Audited groups without a finding since the last strike."""
    audited: int = 0
    """Audited groups in all."""
    strikes: int = 0
    tokens: int = 0
    """Tokens of the groups that passed."""
    missed: int = 0
    """Those of them that were not where their seeds put them: a little in every group adds up."""
    near: int = 0
    """Those of them that were just outside their intervals, which adds up too."""
    gross: int = 0
    """Tokens of all audited groups that no rounding explains; only a pardon forgets them."""
    unaudited: int = 0
    """Groups that were drawn for an audit and could not be checked."""
    unaudited_reason: str = ""
    """Why the last one could not."""
    kept_cache: int = 0
    """Tokens of groups that passed which no audit judges: sampled over a cache that was kept over a swap."""
    quarantined: str = ""
    """Why it is shut out; empty while it is not."""

    @property
    def share(self) -> float:
        """Return the share of its groups to audit, 0..1.

        >>> Standing().share, round(Standing(passed=8).share, 3), round(Standing(passed=200).share, 3)
        (0.25, 0.135, 0.02)
        """
        return LAST_SHARE + (FIRST_SHARE - LAST_SHARE) * math.exp2(-self.passed / HALVING)

    @property
    def sums(self) -> Sums:
        """Return what audits found so far."""
        return Sums(self.tokens, self.missed, self.near, self.gross)

    def pass_group(self, sums: Sums, most: bool = True, kept_cache: int = 0) -> "Standing":
        """Return the standing after an audited group that showed nothing.

        `most`: it sampled most of the group; a smaller part makes no one more trusted. `kept_cache`: its
        tokens that were not judged.
        """
        passed = self.passed + most
        return replace(
            self,
            passed=passed,
            audited=self.audited + most,
            strikes=0 if passed >= FORGIVEN_AFTER else self.strikes,
            tokens=self.tokens + sums.tokens,
            missed=self.missed + sums.missed,
            near=self.near + sums.near,
            kept_cache=self.kept_cache + kept_cache,
        )

    def skip_group(self, reason: str) -> "Standing":
        """Return the standing after a group that could not be checked: it makes no one more trusted."""
        return replace(self, unaudited=self.unaudited + 1, unaudited_reason=reason)

    def strike(self, audited: bool, gross: int = 0) -> "Standing":
        """Return the standing after a strike.

        `audited`: an audit found it, else a refusal; `gross`: tokens that no rounding explains.
        """
        audits = self.audited + audited
        return replace(self, passed=0, audited=audits, strikes=self.strikes + 1, gross=self.gross + gross)

    def shut_out(self, reason: str) -> "Standing":
        return replace(self, passed=0, quarantined=reason)

    def pardon(self) -> "Standing":
        """Return the standing of someone who may try again, as a stranger."""
        counts = ("audited", "unaudited", "unaudited_reason", "kept_cache")
        return Standing(**{name: getattr(self, name) for name in counts})


def quarantine_reason(standing: Standing, certain: bool, words: str) -> str | None:
    """Return why a worker must be shut out after a strike, or None when it may continue.

    `standing` counts the strike already; `certain`: the last finding, `words`, is proof by itself.
    """
    if standing.quarantined:
        return None
    if certain:
        return words
    if standing.strikes >= STRIKES:
        return f"{standing.strikes} strikes, the last one: {words}"
    return None
