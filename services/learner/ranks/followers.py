"""Followers: the other ranks of a learner whose rank 0 is this process, as processes on this host.

Where a run's services are started, each rank is one of the supervisor's processes instead. This process may
be a notebook or a flow, so the group does not end it: when one of them ends, or answers no more, all of them
are ended, and what rank 0 does in the group raises.
"""

from pathlib import Path

from antiphon.core.config import RunConfig, dump_config
from antiphon.services.learner.ranks import group
from antiphon.services.ranks import followers


class Followers(followers.Followers):
    """Started with it, and gone with `close` or with the thread that made it."""

    def __init__(
        self, config: RunConfig, checkpoints: Path, store: Path, moved: RunConfig | None = None
    ) -> None:
        """Start ranks 1 to `learner.ranks` - 1, and make this process rank 0; arguments as for `follow`.

        Raises:
            UnavailableError: with what one of them said, when it does not come to meet this process.
        """
        super().__init__(config.learner.ranks, "learner")
        (self.folder / "config.yaml").write_text(dump_config(config))
        (self.folder / "engine.yaml").write_text(dump_config(moved or config))
        paths = [self.folder / "config.yaml", checkpoints, store, self.folder / "engine.yaml"]
        group.broken = self.end
        self.start(f"{__package__}.follower", list(map(str, paths)), config.services.start_timeout_s)

    def close(self) -> None:
        """End them; rank 0 has ordered them to stop before."""
        super().close()
        group.broken = None
