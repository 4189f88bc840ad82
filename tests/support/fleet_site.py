"""Fleet site: a class of the pool with bundles, and a program that plays its workers."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from antiphon.core.config import RunConfig, build_config
from antiphon.runs.fleet.engines import make_launcher
from antiphon.runs.fleet.launcher import Launcher, LaunchSite
from tests.support.processes import command_of

WORKER = """\
#!/bin/sh
# Plays `antiphon worker`: writes down how it was called, and leaves when it is told to, or does not.
printf '%s\\n' "$@" > "{folder}/called.$$"
[ -e "{folder}/stubborn" ] && trap '' TERM
while :; do sleep 0.1; done
"""


class FleetSite:
    """A class of three workers that a launcher starts here."""

    def __init__(self, folder: Path, launcher: Mapping[str, object], work_dir: bool = True) -> None:
        self.folder = folder
        command = folder / "antiphon"
        command.write_text(WORKER.format(folder=folder))
        command.chmod(0o755)
        for number in range(3):
            bundle = folder / "keys" / "workers" / f"spot-{number}"
            bundle.mkdir(parents=True)
            for name in ("ca.pem", "cert.pem", "key.pem", "token"):
                (bundle / name).write_text(f"secret {name} of {number}")
        place = {"work_dir": str(folder / "there")} if work_dir else {}
        there = {"command": str(command), **place, **launcher}
        pool = [{"name": "spot", "usd_per_hour": 1, "count": 3, "launcher": there}]
        self.config: RunConfig = build_config({"provisioning": {"pool": pool}})
        bundles = folder / "keys" / "workers"
        self.site = LaunchSite("run-1", f"run-1-{folder.name}", "127.0.0.1:7700", bundles, self.config)

    def launcher(self) -> Launcher:
        return make_launcher(self.config.provisioning.pool[0], self.site)

    @property
    def stubborn(self) -> Path:
        """Return the file whose presence makes workers ignore SIGTERM."""
        return self.folder / "stubborn"

    @property
    def called(self) -> list[Path]:
        """Return what each worker that has begun wrote down of its call."""
        return sorted(self.folder.glob("called.*"))

    @property
    def processes(self) -> list[psutil.Process]:
        played = ["/bin/sh", str(self.folder / "antiphon")]
        found = {one.pid: one for one in psutil.process_iter(["ppid"]) if command_of(one)[:2] == played}
        # What a shell is about to run is a copy of the shell for a moment.
        return [one for one in found.values() if one.info["ppid"] not in found]

    def close(self) -> None:
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):  # it is about to leave by itself
                process.kill()
