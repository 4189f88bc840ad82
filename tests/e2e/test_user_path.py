"""The path of a new user, from README's first command to the same steps in another clone.

Nothing on it is guessed: each command stands in README, in a guide that README links, or in what an earlier
command printed. What is added only makes runs small. The clone is one in miniature, and its commands are
those of this environment, since setting up another one takes minutes; `.ci/run` does that.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from antiphon.cli.app import execute
from antiphon.cli.up import read_pages
from antiphon.runs.servers.prefect_server import server_password
from tests.support.browser import Browser
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.checkout import IDENTITY, begin_history, changes, copy_checkout
from tests.support.main_job import PROJECT, SMALL, all_gone, environment, until
from tests.support.prefect_api import find_all
from tests.support.terminal import Terminal, panels

# Three runs, whose parts are those of other tests.
pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.long(in_ci=True), pytest.mark.timeout(900)]
RUN_S = 280.0
"""Longest wait for a run."""
TINY = [*SMALL, "run.steps=3"]
ANY_PORT = ["--prefect-port", "0", "--mlflow-port", "0", "--s3-port", "0"]
PROGRAMS = Path(sys.executable).parent
HERE = ("environments", "evaluate", "export", "keep", "lineage", "replay", "report", "runs")
"""Verbs that leave nothing behind in their process: typed in this one, which has loaded what they load."""


class Person:
    """Someone in a clone, who types only what was said before."""

    def __init__(self, clone: Path) -> None:
        self.clone, self.home = clone, clone / ".antiphon"
        self.said = (PROJECT / "README.md").read_text(encoding="utf-8")
        self.variables = environment(self.home) | {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"}
        for role in ("AUTHOR", "COMMITTER"):
            self.variables |= {f"GIT_{role}_NAME": "t", f"GIT_{role}_EMAIL": "t@example.org"}

    def read(self, guide: str) -> None:
        """Read a page that README or a page read before links to."""
        assert Path(guide).name in self.said, f"nothing names {guide}"
        self.said += (PROJECT / guide).read_text(encoding="utf-8")

    def type(self, named: str, *more: str, **places: str) -> str:
        """Type a command that was named, with what stands in the places of its capital words."""
        assert _bare(named) in self.said, f"nothing names {named!r}"
        words = [*(places.get(word, word) for word in shlex.split(named)), *more]
        done = self._here(words[1:]) if words[1] in HERE else self._apart(words)
        assert done.returncode == 0, f"{named}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        self.said += done.stdout
        return done.stdout

    def _apart(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self._program(words[0]), *words[1:]],
            cwd=self.clone,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )

    def _here(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        said, complained = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
            patch.chdir(self.clone)
            for name, value in self.variables.items():
                patch.setenv(name, value)
            for folder in filter(None, [self.variables.get("PYTHONPATH")]):
                patch.syspath_prepend(folder)
            code = execute(words)
        return subprocess.CompletedProcess(words, code, said.getvalue(), complained.getvalue())

    def watch(self, named: str, *more: str) -> str:
        """Type a command on a terminal and watch its panel to the end; return what stands there then."""
        assert _bare(named) in self.said, f"nothing names {named!r}"
        words = shlex.split(named)
        terminal = Terminal([*self._program(words[0]), *words[1:], *more], self.variables, self.clone, 120)
        try:
            terminal.until("╰", RUN_S)
            assert panels(terminal.screen.shown()) == 1
            code = terminal.finish(RUN_S)
            shown = "\n".join(terminal.screen.shown())
            assert code == 0 and panels(terminal.screen.shown()) == 0, shown
        finally:
            terminal.close()
        self.said += shown
        return shown

    def shell(self, line: str) -> "subprocess.Popen[bytes]":
        """Start a line of a shell."""
        return subprocess.Popen(
            ["sh", "-c", line],
            cwd=self.clone,
            env=self.variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def line(self, begin: str) -> str:
        """Return the newest line that was said and begins so, without its beginning."""
        found = [line.strip() for line in self.said.splitlines() if line.strip().startswith(begin)]
        assert found, f"no line begins with {begin!r}"
        return found[-1].removeprefix(begin)

    def after(self, title: str, count: int) -> list[str]:
        """Return the lines that were last said below a title."""
        below = self.said.rpartition(f"{title}\n")[2]
        return [line.strip() for line in below.splitlines()[:count]]

    def _program(self, word: str) -> list[str]:
        if word == "./antiphon":
            return [sys.executable, "-P", "-m", "antiphon.cli.app"]
        return [str(PROGRAMS / word) if (PROGRAMS / word).exists() else word]

    def ask(self, kind: str) -> list[dict[str, Any]]:
        """Return what the Prefect server holds of a kind."""
        return find_all(read_pages(self.home)["prefect"].url, self.home, kind)

    def flow_run(self, *states: str) -> dict[str, Any]:
        """Wait until the newest flow run of a deployment is in one of these states."""

        def look() -> dict[str, Any] | None:
            found = [one for one in self.ask("flow_runs") if one["deployment_id"]]
            newest = max(found, key=lambda one: str(one["created"]), default=None)
            return newest if newest is not None and newest["state_type"] in states else None

        # Each look has the server answer twice.
        return until(look, RUN_S, lambda: f"no flow run is {states}: {self.ask('flow_runs')}", 0.5) or {}


def _bare(named: str) -> str:
    """Return a command without the way to it: hints name that on the PATH, as this clone has none."""
    return named.removeprefix("./")


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    clone = tmp_path / "clone"
    copy_checkout(PROJECT, clone)
    begin_history(clone)
    found = Person(clone)
    try:
        yield found
    finally:
        if (found.home / "up.json").exists():
            found.type("./antiphon up --stop")
        all_gone(found.home)


def test_from_the_first_command_to_the_same_steps_in_another_clone(
    person: Person, needs_system: Callable[[str], str], tmp_path: Path
) -> None:
    program = needs_system("chromium")
    needs_bubblewrap()
    first = first_run(person)
    person.read("docs/guides/own-environment.md")
    with Browser(program, tmp_path / "profile") as browser:
        own_environment(person)
        person.type("./antiphon up", "--s3", *ANY_PORT)
        browser.go(f"{person.line('prefect: ')}/login")
        password = json.dumps(server_password(person.home))
        browser.run(f"localStorage.setItem('prefect-password', btoa({password}))")
        person.read("docs/guides/README.md")
        person.read("docs/guides/deployments.md")
        person.type("./antiphon deploy")
        worker = start_worker(person)
        try:
            second = run_from_the_form(person, browser)
            schedule_and_cancel(person, browser)
        finally:
            os.killpg(worker.pid, 9)  # in order it would wait for what was just cancelled
            worker.wait(60.0)
        compare(person, browser, first, second)
    assert not changes(person.clone), "a run leaves git's tree as it was"
    another_clone(person, first, tmp_path / "second")


def first_run(person: Person) -> str:
    """Train, look at answers, and take the model away; return the run's id."""
    shown = person.watch("./antiphon demo", *TINY)
    (run,) = re.findall(r"^run (\S+): 3 steps in ", shown, re.MULTILINE)
    answers = person.type(f"./antiphon evaluate {run} --samples")
    assert "held-out best" in answers and "held-out worst" in answers and "  reason  " in answers
    folder = person.clone / "build" / "policy"
    told = person.type(f"./antiphon export {run} best FOLDER", FOLDER=str(folder))
    version = int(re.findall(r"version (\d+) of", told)[0])
    recorded = load_file(person.clone / "ledger" / run / "versions" / f"v{version:06d}.safetensors")
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in recorded.items())
    return run


def own_environment(person: Person) -> None:
    """Look at the class that the guide shows, from its folder; test_own_environment.py trains on it."""
    person.variables["PYTHONPATH"] = str(person.clone / "examples" / "own-environment")
    assert "PYTHONPATH=examples/own-environment ./antiphon run examples/quickstart.yaml" in person.said
    own = "near_sums:NearSums"
    assert f"environment.name={own}" in person.said
    shown = person.type("./antiphon environments reasoning/chain_sum", **{"reasoning/chain_sum": own})
    assert "State the final answer to the following arithmetic problem" in shown
    del person.variables["PYTHONPATH"]


def start_worker(person: Person) -> "subprocess.Popen[bytes]":
    """Start a worker with the lines that `deploy` printed."""
    file, start = person.after("start a worker, one on each machine:", 2)
    worker = person.shell(f"{file} && exec {start}")
    until(lambda: person.ask("work_pools")[0]["status"] == "READY", RUN_S, lambda: "the worker is not there")
    return worker


def run_from_the_form(person: Person, browser: Browser) -> str:
    """Fill in the form, press Submit, and follow the run on its page; return its id."""
    (deployment,) = [one["id"] for one in person.ask("deployments") if one["name"] == "post-train"]
    browser.go(person.line("pages: "))
    browser.shows("post-train", "benchmark")
    browser.go(
        f"{person.line('pages: ')}/deployment/{deployment}/run".replace("deployments//", "deployments/")
    )
    browser.shows("Staleness bound S, in policy versions")
    entry = (
        "Array.from(document.querySelectorAll('.schema-form-property')).filter(e => "
        "e.querySelector('.schema-form-property__label')?.innerText.startsWith('Steps')).pop()"
        ".querySelector('input')"
    )
    browser.wait_for(f"{entry}.value === '60'", "the form does not hold the quickstart's steps")
    browser.type(entry, "1")
    browser.press_until("Submit", "document.body.innerText.includes('scheduled to start')")
    browser.go("about:blank")  # its pages ask and draw all the time
    lived = person.flow_run("COMPLETED")
    browser.go(f"{person.line('prefect: ')}/runs/flow-run/{lived['id']}")
    browser.shows(lived["name"], "Completed")
    browser.click("Logs")
    browser.shows("step 1 of 1: training reward")
    return str(lived["name"])


def schedule_and_cancel(person: Person, browser: Browser) -> None:
    """Switch the schedules on; start a run with the printed line and cancel it on its page."""
    person.type("./antiphon deploy --schedules")
    active = {one["name"]: [s["active"] for s in one["schedules"]] for one in person.ask("deployments")}
    assert active["benchmark"] == [True] and active["post-train"] == []
    (file,) = person.after("start a worker, one on each machine:", 1)
    (line,) = person.after("start a run, there or from the page's form:", 1)
    assert person.shell(f"{file} && {line}").wait(RUN_S) == 0
    running = person.flow_run("RUNNING")
    browser.go(f"{person.line('prefect: ')}/runs/flow-run/{running['id']}")
    browser.shows(running["name"], "Running")
    browser.click("Cancel")
    browser.shows("Cancel Flow Run")
    browser.click("Confirm")
    assert person.flow_run("CANCELLED")["id"] == running["id"]


def compare(person: Person, browser: Browser, first: str, second: str) -> None:
    """Lay the two runs beside each other, as the first one's last lines say."""
    listed = person.type("./antiphon runs")
    assert first in listed and second in listed
    table = person.type(f"./antiphon report {first} OTHER", OTHER=second)
    assert re.search(r"^run\.steps +3 +1$", table, re.MULTILINE), table
    browser.go(Path(person.line("page: ")).as_uri())
    browser.shows(first, second, "Reward over tokens", "loop.prompts_per_step")


def another_clone(person: Person, run: str, folder: Path) -> None:
    """Push the first run's ledger to the bucket, and repeat its steps in a second clone."""
    person.read("docs/operations.md")
    keys = Path(person.line("s3: ").rpartition(". ")[2])
    for line in keys.read_text().splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        person.variables[name] = shlex.split(value)[0]
    address = person.line("s3: ").partition(",")[0]
    person.type("dvc remote add -d team s3://antiphon/dvc")
    person.type(
        "dvc remote modify team endpointurl http://127.0.0.1:8333", **{"http://127.0.0.1:8333": address}
    )
    person.type(f"./antiphon keep {run}")
    told = [part.strip() for part in person.line("git add ").split("&&")]
    subprocess.run(["git", "add", *shlex.split(told[0]), ".dvc/config"], cwd=person.clone, check=True)
    subprocess.run(["git", *IDENTITY, "commit", "-qm", "Keep it"], cwd=person.clone, check=True)
    person.type(f"dvc {told[-1].partition(' ')[2]}")
    subprocess.run(["git", "clone", "-q", str(person.clone), str(folder)], check=True, timeout=60)
    other = Person(folder)
    other.said, other.variables = person.said, {**person.variables, "ANTIPHON_HOME": str(other.home)}
    other.type(re.findall(r"git pull && \.venv/bin/(dvc pull \S+)", person.said)[-1])
    assert "3 of 3 steps" in other.type("./antiphon replay RUN", RUN=run)
    other.type("./antiphon report RUN", RUN=run)
    assert "as recorded" in other.type("antiphon lineage --verify".replace("antiphon", "./antiphon", 1))
