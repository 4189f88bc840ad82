"""Environments in the form in which others publish them, with the versions of host/*.txt.

Their packages are installed once into the user's cache, which takes up to a minute each; without an index the
tests are skipped. They are `long`: scripts/test tests/host/test_published.py runs them.
"""

import asyncio
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.benchmarks.parts.own_environment import MissingToolError, python_with
from antiphon.benchmarks.parts.scripted_gateway import MODEL, TOKEN, ScriptedGateway, until
from tests.support.own_package import install
from tests.support.real_gateway import say_to_hosts

ROOT = Path(__file__).parents[2]
GAMES = (ROOT / "tests" / "support" / "hosted", ROOT / "examples" / "hosted")
PACKAGES = {
    "verifiers-0.4": "verifiers==0.4.0",
    "verifiers-0.1": "verifiers==0.1.14",
    "textarena": "textarena==0.7.4",
}
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the program, built and installed."""
    folder = install(tmp_path_factory.mktemp("host"), example=ROOT / "host")
    (entries,) = folder.glob("*.dist-info/entry_points.txt")
    assert "antiphon-env-host = antiphon_env_host.__main__:main" in entries.read_text()
    return folder


@pytest.fixture
def start(program: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts the program for a gateway, with the packages of a list."""
    started: list[subprocess.Popen[str]] = []

    def begin(packages: str, url: str, *words: str, token: str = TOKEN) -> subprocess.Popen[str]:
        try:
            python = python_with(
                [PACKAGES[packages], "-r", f"{ROOT}/host/{packages}.txt"], beside_project=False
            )
        except MissingToolError as reason:
            pytest.skip(str(reason))
        paths = os.pathsep.join(map(str, (program, *GAMES)))
        variables = {**os.environ, "PYTHONPATH": paths, "ANTIPHON_GATEWAY": url, "ANTIPHON_TOKEN": token}
        command = [str(python), "-m", "antiphon_env_host", *words]
        started.append(subprocess.Popen(command, env=variables, text=True, stderr=subprocess.PIPE))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def repeats(name: str, turn: int, text: str) -> str:
    """Say what the user said last."""
    return text.rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>")[0]


def bets(name: str, turn: int, text: str) -> str:
    """Play Kuhn poker: always 1."""
    return "1"


def calls(tool: str, arguments: str, last: str = "done", often: int = 2) -> Callable[[str, int, str], str]:
    """Call a tool so often, then say something."""
    said = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'
    return lambda name, turn, text: said if turn < often else last


ADD = ("add", '{"a": 3, "b": 4}')
V1 = ("verifiers-0.4", "verifiers", "--tokenizer", str(MODEL))
V0 = ("verifiers-0.1", "verifiers")


@pytest.mark.parametrize(
    ("words", "say", "seats", "rewards", "turns"),
    [
        ((*V1, "small_echo"), repeats, 1, {1.0}, {1}),
        ((*V1, "small_echo", "--args", '{"taskset": {"words": ["four"]}}'), repeats, 1, {1.0}, {1}),
        ((*V1, "small_user"), repeats, 1, {1.0}, {3}),
        ((*V1, "small_duet"), repeats, 2, {1.0}, {1}),
        ((*V1, "small_kuhn"), bets, 2, {-2.0, 2.0}, {1}),
        ((*V1, "small_kuhn"), lambda *_: "", 2, {-1.5, 0.5}, {1}),
        ((*V1, "small_counter"), calls("counter_bump", "{}"), 1, {1.0}, {3}),
        ((*V1, "small_counter"), calls("another", "{}"), 1, {0.0}, {3}),
        ((*V1, "small_sums"), calls(*ADD, "7", often=1), 1, {0.0, 1.0}, {2}),
        ((*V1, "small_sums"), calls(*ADD, "7"), 1, {0.0}, {3}),
        ((*V0, "small_v0"), repeats, 1, {0.5}, {2}),
        ((*V0, "small_v0"), lambda *_: "", 1, {0.0}, {2}),
        ((*V0, "small_v0", "--args", '{"tool": true}'), calls(*ADD, "7"), 1, {0.0, 1.0}, {3}),
        (("textarena", "textarena", "KuhnPoker-v0"), lambda *_: "[check]", 2, {-1.0, 0.0, 1.0}, {3}),
    ],
    ids=lambda value: "-".join(value[-1:]) if isinstance(value, tuple) else "",
)
def test_an_environment_is_played_and_its_report_accepted(
    start: Any, words: tuple[str, ...], say: Any, seats: int, rewards: set[float], turns: set[int]
) -> None:
    packages, *command = words
    with ScriptedGateway(say) as served:
        for number in range(2):
            served.offer(f"g{number}", episodes=2, seats=seats, index=number)
        process = start(packages, served.url, *command)
        asyncio.run(until(lambda: len(served.reports) == 4 or process.poll() is not None, 240))
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "refused" not in said
    seen = [seat for report in served.reports for seat in report["seats"]]
    assert not [seat for seat in seen if "error" in seat]
    assert {seat["reward"] for seat in seen} <= rewards and len(seen) == 4 * seats
    assert {len(served.rows[seat["trajectory"]].turns) for seat in seen} <= turns
    for seat in seen:  # what was sampled is never rendered again
        assert len(seat["branches"]) <= 1 and seat["branches"] == served.rows[seat["trajectory"]].branches()


@pytest.mark.parametrize(
    ("words", "say", "seats", "reward", "turns"),
    [
        ((*V1, "small_kuhn"), bets, 2, 2.0, 1),
        ((*V0, "small_v0"), repeats, 1, 0.5, 2),
        ((*V0, "small_v0", "--args", '{"tool": true}'), lambda *_: calls(*ADD)("", 0, ""), 1, 0.0, 3),
    ],
    ids=["v1", "v0", "v0-tool"],
)
def test_the_gateway_of_a_run_takes_the_reports(
    start: Any, tmp_path: Path, words: tuple[str, ...], say: Any, seats: int, reward: float, turns: int
) -> None:
    packages, *command = words

    with say_to_hosts(tmp_path, say, 3, seats) as served:
        process = start(packages, served.url, *command, token=served.token)
        over = served.coordinator.over
        asyncio.run(until(lambda: over.is_set() or process.poll() is not None, 240))
    for row in served.coordinator.rows.values():
        assert row.over is not None and row.over.failure == "", row.over
        assert abs(row.over.reward) == reward and len(row.sampled) == turns and not row.breaks


def test_a_taskset_goes_on_after_its_host_was_killed_and_nothing_is_sampled_again(start: Any) -> None:
    with ScriptedGateway(bets) as served:
        for number in range(3):
            served.offer(f"g{number}", episodes=2, seats=2, index=number)
        groups = list(served.offered)
        process = start(*V1[:1], served.url, *V1[1:], "small_kuhn")
        asyncio.run(until(lambda: served.rows, 240))
        process.kill()
        sampled = {name: len(row.turns) for name, row in served.rows.items()}
        served.reports.clear()
        served.offered.extend(groups[: 3 - len(served.offered)])
        start(*V1[:1], served.url, *V1[1:], "small_kuhn")
        asyncio.run(until(lambda: len({(r["group"], r["episode"]) for r in served.reports}) == 6, 240))
    assert all(len(served.rows[name].turns) == max(1, count) for name, count in sampled.items())
    assert all("error" not in seat for report in served.reports for seat in report["seats"])


@pytest.mark.parametrize(
    ("words", "seats", "sentence"),
    [
        ((*V1, "no_such"), 1, "verifiers cannot load no_such: "),
        ((*V1, "small_echo", "--args", '{"unknown": 1}'), 1, "verifiers cannot load small_echo: "),
        (("verifiers-0.4", "verifiers", "small_echo"), 1, "--tokenizer=None is no folder; name the model's"),
        ((*V1, "small_kuhn"), 1, r"environment.seats is 1, but verifiers:small_kuhn has 2 agents that train"),
        ((*V0, "no_such"), 1, "verifiers cannot load no_such: ModuleNotFoundError"),
        ((*V0, "small_v0"), 2, "environment.seats is 2, but verifiers:small_v0 has one; set it to 1"),
        (("textarena", "textarena", "Kuhn-v9"), 1, "textarena has no game Kuhn-v9; it has KuhnPoker-v0"),
        (("textarena", "verifiers", "X"), 1, "verifiers is not installed beside this program"),
    ],
    ids=lambda value: "-".join(value[-1:]) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_one_sentence(
    start: Any, words: tuple[str, ...], seats: int, sentence: str
) -> None:
    packages, *command = words
    with ScriptedGateway(repeats) as served:
        served.offer("g", seats=seats)
        process = start(packages, served.url, *command)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.search(rf"^antiphon-env-host: {re.escape(sentence)}", said, re.MULTILINE), said


def test_an_environment_that_never_gives_way_ends_the_host(start: Any) -> None:
    """No report is possible: the program ends and says where; the gateway gives its groups to another."""
    with ScriptedGateway(repeats) as served:
        served.offer("g")
        words = ("small_v0", "--args", '{"stuck": true}', "--episode-s", "3")
        process = start(*V0[:1], served.url, *V0[1:], *words)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 1 and "small_v0.py" in said and not served.reports
