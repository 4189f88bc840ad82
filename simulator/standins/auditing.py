"""Auditing: the auditor's stand-in, which computes every token again instead of scoring it."""

from collections.abc import Sequence

import numpy as np

from antiphon.core.errors import UnavailableError
from antiphon.core.records import GroupToAudit, Trajectory
from antiphon.core.trust.audit import SampleStatistics
from antiphon.services.learner.audits.token_scores import TokenScores
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.virtual.chunks import MemoryPayloads


class ArithmeticAuditor:
    """Compares completions with what prompt, seed and versions give."""

    def __init__(self, payloads: MemoryPayloads) -> None:
        """Examine versions of which `payloads` has the snapshot."""
        self._payloads = payloads

    def examine(self, group: GroupToAudit) -> Sequence[SampleStatistics]:
        """Return what each sample and author showed; see `services.learner.audits.audit_loop.Examiner`."""
        found, prompt = [], arithmetic.prompt_number(group.prompt_token_ids)
        scored = 0
        for trajectory in group.submission.trajectories:
            scores = self._scores(trajectory, prompt)
            scored += int(scores.scored.sum())
            found += scores.by_author(trajectory.sample_index, group.authors)
        if not scored:
            raise UnavailableError("no version of the group is kept any more")
        return found

    def forget(self) -> None:
        """It keeps nothing."""

    def _scores(self, trajectory: Trajectory, prompt: int) -> TokenScores:
        scores = TokenScores.of(trajectory)
        for span in trajectory.spans:
            if span.version not in self._payloads.versions():
                continue
            digest = self._payloads.manifest(span.version).weights_digest
            weights = {span.version: arithmetic.weights_number(digest)}
            tokens, logprobs = arithmetic.completion(weights, (span,), prompt, trajectory.seed)
            places = slice(span.start, span.stop)
            wrong = tokens != trajectory.token_ids[places]
            scores.scored[places] = True
            scores.missed[places] = scores.near[places] = scores.gross[places] = wrong
            scores.difference[places] = np.abs(logprobs - trajectory.logprobs[places])
        return scores
