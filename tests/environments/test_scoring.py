"""An answer can hurt nothing but itself, whatever its scorer does with it."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import build_config, dump_config
from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.environments.outside import secret_values
from antiphon.environments.scoring.messages import (
    Failed,
    ScoringTask,
    Verdict,
    checked_reward,
    hung,
    parse_result,
    result_line,
)
from antiphon.environments.scoring.pool import ScoringPool, ScoringProcess
from antiphon.system.processes import ChildProcess
from antiphon.system.sandbox import NOBODY, check_sandbox
from tests.support.attempts import ATTEMPTS, attack
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.evaluating import FACTORY, FOLDER, HONEST

DEADLINE_S = 120.0
TASK = ScoringTask("sandbox/evaluating", {}, 0, 8, 8, 0.5, 1 << 30, FACTORY, (FOLDER,), (FOLDER,))
RETURNING = replace(TASK, name="sandbox/returning")
SERVICE = f"""
import asyncio, sys
sys.path.append({FOLDER!r})
from antiphon.environments.scoring.messages import ScoringTask
from antiphon.environments.scoring.pool import ScoringPool

async def main():
    folders = ({FOLDER!r},)
    task = ScoringTask("sandbox/evaluating", {{}}, 0, 8, 8, 600.0, 1 << 30, {FACTORY!r}, folders, folders)
    async with ScoringPool(task, processes=1, attempts=1, sandbox=sys.argv[1] == "1", patience_s=1.0) as pool:
        print(pool.processes[0].pid, flush=True)
        await pool.score("train-0-0", ["while True: pass"])

asyncio.run(main())
"""
"""A service whose answer runs for ten minutes."""


def run(story: Awaitable[None]) -> None:
    async def body() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story

    asyncio.run(body())


def make_pool(
    task: ScoringTask = TASK,
    *,
    processes: int = 1,
    sandbox: bool = True,
    attempts: int = 3,
    patience_s: float = 10.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> ScoringPool:
    if sandbox:
        needs_bubblewrap()
    return ScoringPool(
        task, processes=processes, attempts=attempts, sandbox=sandbox, patience_s=patience_s, sleep=sleep
    )


def process_1(pool: ScoringPool) -> psutil.Process:
    """Return the process that holds the environment, as the machine sees it."""
    (inside,) = psutil.Process(pool.processes[0].pid).children()
    return inside


def test_no_attempt_succeeds_and_the_next_answers_are_scored_as_ever() -> None:
    needs_bubblewrap()
    found = asyncio.run(attack(ATTEMPTS, answer_timeout_s=0.3))
    assert len(ATTEMPTS) >= 75 and found == ([], [], 0)


@pytest.mark.parametrize("sandbox", [True, False])
def test_results_of_a_process_that_has_ended_meanwhile_count(sandbox: bool) -> None:
    async def story() -> None:
        found = []
        async with make_pool(sandbox=sandbox) as pool:
            process = pool.processes[0]
            with pytest.raises(ContractError, match="exit code 3"):
                async for result in process.results(
                    "train-0-0", [HONEST, HONEST, "import os; os._exit(3)"], 3
                ):
                    found.append(result)
                    await process._process.wait()
        assert found == [1.0, 1.0]

    run(story())


@pytest.mark.parametrize("sandbox", [True, False])
def test_an_answer_that_hangs_or_ends_its_process_fails_alone(sandbox: bool) -> None:
    async def story() -> None:
        answers = [HONEST, "while True: pass", "import os; os._exit(3)", "won = False", HONEST]
        async with make_pool(sandbox=sandbox) as pool:
            assert await pool.score("train-0-0", answers) == [
                1.0,
                Failed("the scorer gave no reward within 0.5 s"),
                Failed("a scoring process ended: an answer ended the process that scored it (exit code 3)"),
                0.0,
                1.0,
            ]

    run(story())


@pytest.mark.parametrize(
    ("reward", "verdict"),
    [
        ("0.25", 0.25),
        ("True", 1.0),
        ("None", Failed("the scorer returned NoneType instead of a number")),
        ("'1'", Failed("the scorer returned str instead of a number")),
        ("float('nan')", Failed("the scorer returned nan, which lies outside 0..1")),
        ("1e9", Failed("the scorer returned 1000000000.0, which lies outside 0..1")),
        ("10**400", Failed("the scorer returned a huge number, which lies outside 0..1")),
        ("1/0", Failed("the scorer failed: ZeroDivisionError: division by zero")),
    ],
)
def test_what_is_no_reward_is_a_failure_with_its_reason(reward: str, verdict: float | Failed) -> None:
    async def story() -> None:
        async with make_pool(RETURNING, sandbox=False) as pool:
            assert await pool.score("train-0-0", [f"reward = {reward}"]) == [verdict]

    run(story())


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_scorer_may_multiply_matrices(sandbox: bool) -> None:
    task = replace(RETURNING, answer_timeout_s=DEADLINE_S / 2)

    async def story() -> None:
        async with make_pool(task, sandbox=sandbox) as pool:
            # Large enough for OpenBLAS to want threads, which no answer may start, and to wait for them.
            product = "import numpy; reward = float((numpy.eye(400) @ numpy.eye(400))[7, 7])"
            threads = "reward = len(__import__('os').listdir('/proc/self/task')) == 1"
            answers = [product] if sandbox else [f"{product}; {threads}"]
            assert await pool.score("train-0-0", answers) == [1.0]

    run(story())


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_secret_reaches_the_scorer_and_no_reason_that_is_kept(sandbox: bool) -> None:
    task = replace(RETURNING, secrets={"JUDGE_KEY": "sk1"})
    assert "sk1" not in repr(task)

    async def story() -> None:
        async with make_pool(task, sandbox=sandbox) as pool:
            knows = "reward = __import__('os').environ.get('JUDGE_KEY') == 'sk1'"
            tells = "raise type('sk1', (Exception,), {})('sk1')"
            assert await pool.score("train-0-0", [knows, tells]) == [
                1.0,
                Failed("the scorer failed: $JUDGE_KEY: $JUDGE_KEY"),
            ]

    run(story())


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_group_costs_no_more_deadlines_than_its_attempts(sandbox: bool) -> None:
    async def story() -> None:
        async with make_pool(sandbox=sandbox, attempts=2) as pool:
            found = await pool.score("train-0-0", [HONEST, *["while True: pass"] * 6, HONEST])
            unscored = Failed("not scored: answers to this problem hung or ended their process 2 times")
            late = Failed("the scorer gave no reward within 0.5 s")
            assert found == [1.0, late, late, *[unscored] * 5]
            before = pool.processes[0].pid
            assert await pool.score("train-0-1", [HONEST]) == [1.0]
            assert pool.processes[0].pid == before

    run(story())


class Scripted(ScoringProcess):
    """Scores as it is told to: an answer is scored, hangs, or ends the process."""

    def __init__(self) -> None:
        super().__init__(TASK, sandbox=False)
        self.deadlines = 0

    @property
    def running(self) -> bool:
        return True

    async def results(self, key: str, texts: Sequence[str], hangs: int) -> AsyncIterator[Verdict]:
        for text in texts:
            if text != "scored":
                self.deadlines += 1
                hangs -= 1
            if text == "ends":
                raise ContractError("a scoring process ended")
            yield hung(TASK.answer_timeout_s) if text == "hangs" else 1.0
            if not hangs:
                return


@given(
    st.integers(1, 1024).flatmap(
        lambda size: st.dictionaries(
            st.integers(0, size - 1), st.sampled_from(["hangs", "ends"]), max_size=12
        ).map(lambda bad: [bad.get(index, "scored") for index in range(size)])
    ),
    st.integers(1, 8),
)
def test_a_group_of_every_size_costs_no_more_deadlines_than_its_attempts(
    texts: list[str], attempts: int
) -> None:
    async def story() -> None:
        pool, process = make_pool(sandbox=False, attempts=attempts), Scripted()
        pool._idle.put_nowait(process)
        found = await pool.score("train-0-0", texts)
        assert len(found) == len(texts) and process.deadlines <= attempts
        assert all(
            isinstance(verdict, Failed) or text == "scored"
            for text, verdict in zip(texts, found, strict=True)
        )
        if sum(text != "scored" for text in texts) < attempts:
            assert [isinstance(verdict, Failed) for verdict in found] == [text != "scored" for text in texts]

    run(story())


def test_a_secret_is_named_in_the_configuration_and_set_where_the_run_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = build_config({"environment": {"secrets": ["JUDGE_KEY"]}})
    monkeypatch.setenv("JUDGE_KEY", "sk1")
    assert secret_values(config.environment.secrets) == {"JUDGE_KEY": "sk1"}
    assert "sk1" not in dump_config(config)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"environment\.secrets names JUDGE_KEY, which is not set here"):
        secret_values(config.environment.secrets)
    for wrong in ("sk-1234", "LD_PRELOAD", "PATH", "A=b"):
        with pytest.raises(ConfigError, match="something else than names of variables") as refused:
            build_config({"environment": {"secrets": [wrong]}})
        assert wrong not in str(refused.value)


def test_an_answer_has_no_number_and_not_the_user_of_the_process_that_it_came_from() -> None:
    async def story() -> None:
        seen = "import os; raise ValueError(str((os.getpid(), os.getppid(), os.getuid())))"
        async with make_pool() as pool:
            (found,) = await pool.score("train-0-0", [seen])
            user = os.getuid() or NOBODY
            assert found == Failed(f"the scorer failed: ValueError: (1, 0, {user})")
            assert process_1(pool).uids().real == os.getuid()

    run(story())


def test_a_process_is_replaced_after_an_answer_ended_its_fork() -> None:
    async def story() -> None:
        async with make_pool(attempts=1) as pool:
            before = pool.processes[0].pid
            (found,) = await pool.score("train-0-0", ["import os; os.kill(os.getpid(), 11); os.abort()"])
            assert isinstance(found, Failed) and "ended the process that scored it (signal" in found.reason
            assert await pool.score("train-0-0", [HONEST]) == [1.0]
            assert pool.processes[0].pid != before

    run(story())


def test_all_processes_that_draw_problems_have_one_order_of_sets(tmp_path: Path) -> None:
    """Some tasks of the library draw from a set, and an answer is scored by another process than asks it."""
    said = "str(list(map(str, {*'abcdefghijklmnopqrstuvwxyz'})))"

    async def story() -> set[str]:
        found = set()
        for sandbox in (True, False):
            async with make_pool(sandbox=sandbox) as pool:
                (failed,) = await pool.score("train-0-0", [f"raise ValueError({said})"])
                assert isinstance(failed, Failed)
                found.add(failed.reason.removeprefix("the scorer failed: ValueError: "))
        return found

    child = ChildProcess([sys.executable, "-c", f"print({said})"], tmp_path / "log")
    child.wait(DEADLINE_S)
    assert asyncio.run(story()) == {(tmp_path / "log").read_text().strip()}


def test_process_1_ignores_an_interrupt() -> None:
    async def story() -> None:
        async with make_pool() as pool:
            inside = process_1(pool)
            inside.send_signal(signal.SIGINT)
            assert await pool.score("train-0-0", [HONEST]) == [1.0]
            assert process_1(pool) == inside

    run(story())


@pytest.mark.parametrize("sandbox", [True, False])
def test_nothing_is_left_when_the_service_is_killed(sandbox: bool) -> None:
    if sandbox:
        needs_bubblewrap()
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(int(sandbox))], stdout=subprocess.PIPE, text=True
    )
    with service:
        assert service.stdout is not None
        started = psutil.Process(int(service.stdout.readline()))
        limit_s = time.monotonic() + DEADLINE_S
        while len(family := [started, *started.children(recursive=True)]) < (3 if sandbox else 2):
            assert time.monotonic() < limit_s, "the answer got no process of its own"
        service.kill()
    _, left = psutil.wait_procs(family, timeout=30)
    assert left == []


def test_what_ended_a_scoring_process_is_in_the_reason() -> None:
    async def story() -> None:
        async with make_pool(attempts=1) as pool:
            (found,) = await pool.score("train-0-missing", [HONEST])
            cause = "FileNotFoundError: [Errno 2] No such file or directory: '/data/missing'"
            assert found == Failed(f"a scoring process ended: {cause}")

    run(story())


def test_a_process_that_is_killed_is_replaced_and_nothing_is_lost() -> None:
    async def story() -> None:
        async with make_pool(processes=2) as pool:
            waiting = [asyncio.create_task(pool.score("train-0-0", [HONEST] * 4)) for _ in range(20)]
            for process in pool.processes:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            assert await asyncio.gather(*waiting) == [[1.0] * 4] * 20

    run(story())


def test_a_sandbox_that_cannot_start_again_is_waited_for_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        pauses: list[float] = []

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                monkeypatch.setenv("PATH", path)

        path = os.environ["PATH"]
        async with make_pool(sleep=sleep) as pool:
            for lasting in (False, True):
                monkeypatch.setenv("PATH", "/nowhere")
                await pool.processes[0].end()
                if lasting:
                    pauses.extend([0.0, 0.0])  # the sandbox does not come back
                    with pytest.raises(UnavailableError, match="no scoring process could be started for 10"):
                        await pool.score("train-0-0", [HONEST])
                    assert pauses[4:] == [1.0, 2.0, 4.0]
                else:
                    assert await pool.score("train-0-0", [HONEST]) == [1.0]
                    assert pauses == [1.0, 2.0]
            monkeypatch.setenv("PATH", path)

    run(story())


def test_without_bubblewrap_the_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"apt-get install bubblewrap.*reward\.sandbox=process"):
        check_sandbox()


def test_a_kernel_that_does_not_hold_to_the_list_of_system_calls_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_bubblewrap()
    check_sandbox()
    everything = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # a program that allows every call
    monkeypatch.setattr("antiphon.system.sandbox.filter_program", lambda: everything)
    with pytest.raises(ConfigError, match=r"does not refuse .* \(seccomp\)"):
        check_sandbox()


def test_an_environment_that_cannot_be_built_is_a_sentence() -> None:
    async def story() -> None:
        wrong = ScoringTask("reasoning/chain_sum", {"terms": 3}, 0, 8, 8, 1.0, 1 << 30)
        with pytest.raises(ConfigError, match=r"environment\.parameters\.terms is not a parameter"):
            async with make_pool(wrong, sandbox=False):
                pass

    run(story())


RANGES = st.tuples(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9)).map(lambda pair: (pair[0], sum(pair)))


@given(RANGES, st.floats(allow_nan=True, allow_infinity=True) | st.integers() | st.booleans())
def test_a_reward_lies_within_the_range_or_is_a_failure_that_names_it(
    within: tuple[float, float], value: float
) -> None:
    low, high = within
    found = checked_reward(value, within)
    if isinstance(found, Failed):
        margin = 1e-6 * (high - low)
        assert not low - margin <= value <= high + margin
        assert found.reason.endswith(f"lies outside {low:g}..{high:g}") and "\n" not in found.reason
    else:
        assert low <= found <= high
        assert found == value or not low <= value <= high
        assert parse_result(result_line(found), within) == found
        assert checked_reward(found, within) == found


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_scoring_process_holds_to_the_range_of_its_environment(sandbox: bool) -> None:
    async def story() -> None:
        wide = replace(RETURNING, reward_range=(-2.0, 3.0))
        async with make_pool(wide, sandbox=sandbox) as pool:
            texts = [f"reward = {value}" for value in ("-2.0", "3", "0.25", "3.1", "-2.000001", "'no'")]
            least, most, some, over, rounded, no = await pool.score("train-0-0", texts)
        assert (least, most, some, rounded) == (-2.0, 3.0, 0.25, -2.0)
        assert over == Failed("the scorer returned 3.1, which lies outside -2..3")
        assert no == Failed("the scorer returned str instead of a number")

    run(story())


@given(st.one_of(st.floats(0.0, 1.0), st.builds(Failed, st.just("one reason"))))
def test_results_cross_the_pipe_as_they_are(result: float | Failed) -> None:
    assert parse_result(result_line(result)) == result


@given(st.binary(max_size=200))
def test_what_else_comes_from_a_process_is_an_error_of_it(line: bytes) -> None:
    try:
        found = parse_result(line)
    except ContractError:
        return
    assert isinstance(found, Failed) or checked_reward(found) == found
