"""Group in flight: one lease being sampled, complete when every seed has its completion."""

import dataclasses
from dataclasses import dataclass, field

from antiphon.core.drafting_figures import add_figures
from antiphon.core.records import DraftingFigures, GroupSubmission, Lease, Trajectory
from antiphon.services.rollout.engine import EngineOutput, EngineRequest


@dataclass(slots=True)
class GroupInFlight:
    """The requests of one lease and what came of them so far."""

    lease: Lease
    started_at: float
    """On the event loop's clock, when the engine was given the requests."""
    outputs: dict[int, EngineOutput] = field(default_factory=dict)
    """Finished completions by sample index."""

    def requests(self) -> list[EngineRequest]:
        """Return one engine request per seed of the lease."""
        lease = self.lease
        return [
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=lease.prompt.token_ids,
                seed=seed,
                sampling=lease.sampling,
                group=lease.lease_id,
                history=lease.history,
            )
            for request_id, seed in zip(self.request_ids(), lease.seeds, strict=True)
        ]

    def request_ids(self) -> list[str]:
        """Return the engine's name of each sample, `lease/index`."""
        return [f"{self.lease.lease_id}/{index}" for index in range(len(self.lease.seeds))]

    def take(self, sample_index: int, output: EngineOutput) -> bool:
        """Keep a finished completion and tell whether the group is complete."""
        self.outputs[sample_index] = output
        return len(self.outputs) == len(self.lease.seeds)

    def submission(self, worker_id: str, finished_at: float) -> GroupSubmission:
        """Return what is handed in, samples in the order of their seeds.

        Args:
            worker_id: who hands it in.
            finished_at: on the same clock as `started_at`.
        """
        trajectories = tuple(
            Trajectory(
                sample_index=index,
                seed=seed,
                token_ids=self.outputs[index].token_ids,
                behaviour_logprobs=self.outputs[index].logprobs,
                spans=self.outputs[index].spans,
                finish_reason=self.outputs[index].finish_reason,
            )
            for index, seed in enumerate(self.lease.seeds)
        )
        return GroupSubmission(
            lease_id=self.lease.lease_id,
            group_id=self.lease.group_id,
            worker_id=worker_id,
            trajectories=trajectories,
            generation_s=finished_at - self.started_at,
            drafting=self._drafting(),
        )

    def _drafting(self) -> DraftingFigures | None:
        parts = [output.drafting for output in self.outputs.values() if output.drafting is not None]
        whole = add_figures(parts)
        # `outputs` has them in the order in which they finished: the last one knows the newest gain.
        return None if whole is None else dataclasses.replace(whole, gain=float(parts[-1].gain))


def split_request_id(request_id: str) -> tuple[str, int]:
    """Return the lease and the sample index that a request id names.

    >>> split_request_id("a1/7")
    ('a1', 7)
    """
    lease_id, _, index = request_id.rpartition("/")
    return lease_id, int(index)
