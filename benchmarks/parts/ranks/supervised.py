"""A run of ranks under the supervisor, as a program: it is killed, too, and then started again.

python -m antiphon.benchmarks.parts.ranks.supervised FOLDER FIRST KILLS     with kills from FIRST on
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.benchmarks.parts.ranks.program import KILL
from antiphon.runs.supervisor import ServiceSpec, Supervisor
from antiphon.system.processes import ChildGroup, ChildProcess, tie_to_parent


class KillingSupervisor(Supervisor):
    """Gives each start the next kill, and notes it with the ids of its processes."""

    kills: tuple[str, ...] = ()
    folder = Path()
    begun = 0

    def _start(
        self, spec: ServiceSpec, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> ChildProcess:
        kill = self.kills[self.begun] if self.begun < len(self.kills) else ""
        self.begun += 1
        started = super()._start(spec, arguments, {**environment, KILL: kill})
        with (self.folder / "starts").open("a") as log:
            assert isinstance(started, ChildGroup)
            log.write(json.dumps([kill, [one.pid for one in started.processes]]) + "\n")
        return started


def main(folder: Path, first: int, kills: Sequence[str]) -> int:
    """Supervise the run until it is done."""
    tie_to_parent()
    failed: list[str] = []
    supervisor = KillingSupervisor(folder, 10_000, 1.0, failed.append)
    supervisor.kills, supervisor.folder = tuple(kills[first:]), folder
    command = (sys.executable, "-P", "-m", "antiphon.benchmarks.parts.ranks.program", "train", str(folder))
    ranks = json.loads((folder / "run.json").read_text())["cell"]["ranks"]
    supervisor.expect_end()
    supervisor.start(ServiceSpec("learner", ("serve",), command=command, ranks=ranks))
    while not (failed or (folder / "done").exists()):
        time.sleep(0.05)
        supervisor.begin_again()  # without the pauses of a service that ends again and again
    supervisor.close()
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
