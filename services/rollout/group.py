"""Group in flight: one lease being sampled, complete when every seed has its completion.

A group that another worker began continues where that one's progress ends: the engine is given the
tokens that are there and samples the rest, and what is handed in is the two joined.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from antiphon.api.engine import EngineOutput, EngineProgress, EngineRequest
from antiphon.core.drafting.statistics import add_statistics
from antiphon.core.records import (
    DraftingStatistics,
    GroupSubmission,
    Lease,
    PartialTrajectory,
    Trajectory,
)
from antiphon.core.spans import joined, rest_of, shifted


@dataclass(slots=True)
class GroupInFlight:
    """The requests of one lease and what came of them so far."""

    lease: Lease
    started_at: float
    """On the event loop's clock, when the engine was given the requests."""
    prefixes: Mapping[int, PartialTrajectory] = field(default_factory=dict)
    """Sample index -> what an earlier holder sampled of it."""
    outputs: dict[int, EngineOutput] = field(default_factory=dict)
    """Completions finished here, by sample index; a prefix is no part of them."""
    kept: dict[int, int] = field(default_factory=dict)
    """Sample index -> completion tokens that the coordinator said it keeps."""

    def requests(self) -> list[EngineRequest]:
        """Return one engine request for each sample that is not finished yet."""
        lease = self.lease
        return [
            EngineRequest(
                request_id=self.request_id(index),
                prompt_token_ids=lease.prompt.token_ids,
                seed=seed,
                sampling=lease.sampling,
                group=lease.lease_id,
                history=lease.history,
                prefix_token_ids=tuple(self.prefixes[index].token_ids.tolist())
                if index in self.prefixes
                else (),
            )
            for index, seed in enumerate(lease.seeds)
            if not self._ended_before(index)
        ]

    def request_id(self, sample_index: int) -> str:
        """Return the engine's name of a sample, `lease/index`."""
        return f"{self.lease.lease_id}/{sample_index}"

    def unfinished(self) -> list[int]:
        """Return the samples that the engine is sampling."""
        return [
            index
            for index in range(len(self.lease.seeds))
            if index not in self.outputs and not self._ended_before(index)
        ]

    def request_ids(self) -> list[str]:
        """Return the engine's name of every sample that it is sampling."""
        return [self.request_id(index) for index in self.unfinished()]

    @property
    def complete(self) -> bool:
        """Return whether every completion is there."""
        return not self.unfinished()

    def known(self) -> dict[str, int]:
        """Return, by request id, how many tokens sampled here the coordinator keeps already."""
        return {
            self.request_id(index): max(0, self.kept.get(index, 0) - self._given(index))
            for index in self.unfinished()
        }

    def note_kept(self, kept: Iterable[int]) -> None:
        self.kept = dict(enumerate(kept))

    def pieces(self, progress: Mapping[str, EngineProgress]) -> list[PartialTrajectory]:
        """Return what the coordinator does not keep yet, in sample order.

        Args:
            progress: by request id, what the engine reports of the samples it is sampling.
        """
        found = []
        for index in range(len(self.lease.seeds)):
            whole = self._whole(index, progress.get(self.request_id(index)))
            piece = None if whole is None else rest_of(whole, self.kept.get(index, 0))
            if piece is not None:
                found.append(piece)
        return found

    def submission(self, worker_id: str, finished_at: float) -> GroupSubmission:
        """Return what is handed in, samples in the order of their seeds; same clock as `started_at`."""
        return GroupSubmission(
            lease_id=self.lease.lease_id,
            group_id=self.lease.group_id,
            worker_id=worker_id,
            trajectories=tuple(self._trajectory(i, seed) for i, seed in enumerate(self.lease.seeds)),
            generation_s=finished_at - self.started_at,
            drafting=self._drafting(),
        )

    def _trajectory(self, index: int, seed: int) -> Trajectory:
        whole = self._whole(index, None)
        assert whole is not None and whole.finish_reason is not None, "the group is complete"
        return Trajectory(
            whole.token_ids,
            whole.logprobs,
            whole.spans,
            whole.finish_reason,
            sample_index=index,
            seed=seed,
        )

    def _whole(self, index: int, progress: EngineProgress | None) -> PartialTrajectory | None:
        """Return a sample from what came with the lease and what was sampled here; None without either.

        Where the engine returned only what is new since some token, the piece begins there.
        """
        prefix, sampled = self.prefixes.get(index), self.outputs.get(index) or progress
        if sampled is None:
            return prefix
        given = self._given(index)
        own = PartialTrajectory(
            sampled.token_ids,
            sampled.logprobs,
            shifted(sampled.spans, given),
            sampled.finish_reason,
            sample_index=index,
        )
        return own if prefix is None or own.start > given else joined([prefix, own])

    def _given(self, index: int) -> int:
        return self.prefixes[index].stop if index in self.prefixes else 0

    def _ended_before(self, index: int) -> bool:
        return index in self.prefixes and self.prefixes[index].finish_reason is not None

    def _drafting(self) -> DraftingStatistics | None:
        parts = [output.drafting for output in self.outputs.values() if output.drafting is not None]
        whole = add_statistics(parts)
        # `outputs` has them in the order in which they finished: the last one knows the newest gain.
        return None if whole is None else dataclasses.replace(whole, gain=float(parts[-1].gain))


def split_request_id(request_id: str) -> tuple[str, int]:
    """Return the lease and the sample index that a request id names.

    >>> split_request_id("a1/7")
    ('a1', 7)
    """
    lease_id, _, index = request_id.rpartition("/")
    return lease_id, int(index)
