"""CPU time: each process counts for what it is for, also after it ended."""

import subprocess
import sys

import psutil
import pytest

from antiphon.runs.servers.prefect_server import APPLICATION
from antiphon.system.cpu_time import KINDS, FamilyTimes, kind_of

APP = ("python", "-P", "-m", "antiphon.cli.app")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((*APP, "serve", "coordinator", "--config", "x"), "coordinator"),
        ((*APP, "serve", "learner"), "learner"),
        ((*APP, "serve", "reward"), "reward"),
        ((*APP, "worker", "--name", "worker-0"), "workers"),
        (("python", "-P", "-m", "antiphon.system.collecting", "uvicorn", *APPLICATION), "prefect"),
        (("python", "-P", "-m", "antiphon.system.processes", "python", "uvicorn", *APPLICATION), "prefect"),
        (("python", "-P", "-m", "uvicorn", "--factory", "another:application"), "flow"),
        ((*APP, "run", "x.yaml"), "flow"),
        ((), "flow"),
    ],
)
def test_a_process_is_known_by_its_words(words: tuple[str, ...], kind: str) -> None:
    assert kind_of(words) == kind
    assert kind_of(("git", "status"), inherited=kind) == kind


def test_what_ended_stays_counted() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", burn, "serve", "learner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    times = FamilyTimes(psutil.Process())
    try:
        assert child.stdout is not None
        child.stdout.readline()
        seen = times.look()
    finally:
        child.communicate(b"\n", timeout=60)
    assert set(seen) == set(KINDS) and seen["learner"] >= 0.1 and seen["flow"] > 0
    assert times.look()["learner"] == seen["learner"]


def test_what_is_ending_and_has_no_words_any_more_counts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    me = psutil.Process()
    times = FamilyTimes(me)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: ["python", "serve", "learner"])
    seen = times.look()
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: [])
    again = times.look()
    assert again["learner"] >= seen["learner"] > 0.0 == again["flow"]
