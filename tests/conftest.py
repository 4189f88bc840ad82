"""Every run of the tests can be repeated: seeds are shown, waits end, and what was left out is named."""

import atexit
import gc
import os
import resource
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling
from xdist.workermanage import WorkerController

from antiphon.benchmarks.parts.postgres import find_initdb
from antiphon.system.collecting import collect_as_usual, collect_seldom

collect_seldom()  # while all tests and what they import are loaded
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="antiphon-tests-")  # their homes are none of theirs
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
for _name in [*os.environ]:  # the home, servers and credentials of who runs the tests are none of theirs
    if _name.startswith(("PREFECT_", "MLFLOW_")) or _name in {"ANTIPHON_HOME", "ANTIPHON_CREDENTIALS"}:
        del os.environ[_name]

# Several processes share the cores: threads of torch that spin while they wait take them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

IN_CI = os.environ.get("ANTIPHON_CI") == "1"
SEED = int(os.environ.get("ANTIPHON_TEST_SEED", "0" if IN_CI else str(secrets.randbelow(2**31))))
os.environ["ANTIPHON_TEST_SEED"] = str(SEED)  # processes that share the tests share the seed
PRELOADED = os.environ.get("LD_PRELOAD")
ORDER = (
    *(
        "project",
        "core",
        "system",
        "models",
        "api",
        "cpu",
        "net",
        "sampling",
        "environments",
        "host",
        "lineage",
        "weights",
    ),
    *("report", "properties", "simulation", "docs"),
    *("cli", "runs", "flows", "benchmarks", "services", "e2e"),
)
"""Quick folders first: a mistake shows before minutes were spent on engines."""
SHARES_A_RUN = ("e2e/test_main_job.py", "e2e/test_browser.py", "e2e/test_pulled.py")
SHARES_A_WORKER = tuple(
    f"e2e/test_{name}.py"
    for name in (
        *("bad_input", "code_environment", "file_environment", "hosted_environment", "judged_run"),
        *("no_signal", "own_environment", "poker_environment", "turn_faults"),
    )
)
SHARES_AN_IMPORT = (
    *("cpu/test_vllm_kernels.py", "services/learner/test_replay_engine.py"),
    *(
        f"services/rollout/test_{name}.py"
        for name in (
            *("batch_independence", "continuation_engine", "drafting_engine", "engine_swaps"),
            *("gumbel_engine", "mixture_engine", "selfcheck", "turns_engine", "vllm_compat"),
            "vllm_engine",
        )
    ),
)
ONE_PROCESS = {"one run": SHARES_A_RUN, "one worker": SHARES_A_WORKER, "one import": SHARES_AN_IMPORT}
"""One process has all of these files: the finished run that they look at is then made once, the worker of
tests/support/standing.py started once, and vLLM, which takes ten seconds of CPU to load, loaded once."""
LONGEST = (*SHARES_A_RUN, "e2e/test_user_path.py", "e2e/test_faults.py", *SHARES_A_WORKER)
"""Last of all, and of these the longest last; `ByFile` begins there too."""
LONG = (
    *(
        "services/learner/ranks/test_ranks.py",
        "services/learner/test_learner.py",
        "flows/test_deployments.py",
    ),
    *("e2e/test_library_page.py", "e2e/test_repro.py", "e2e/test_fixed_mode.py", "runs/test_suites.py"),
)
"""A minute of CPU or more: they come before what is quick, but for the first folders, so that those processes
which did not begin with the longest end with small files, at the same time."""

# By default each run draws other examples, so that many runs see what one does not; in CI it draws the same.
_COMMON = dict(max_examples=40, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", derandomize=True, database=None, **_COMMON)
settings.register_profile("dev", **_COMMON)
settings.load_profile("ci" if IN_CI else "dev")

PROGRAMS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "gcc": ("cc",),
    "git": ("git",),
    "munge": ("munged",),
    "openssh-server": ("sshd",),
    "postgresql": ("initdb",),
    "slurm-wlm": ("slurmctld",),
}
"""Debian's package -> names under which its program may be installed."""
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
"""Where: servers lie in folders that a user's path may leave out."""


def pytest_report_header() -> str:
    """Say how to repeat this run."""
    chance = "derandomized" if IN_CI else "random, a failure prints its own seed"
    return f"antiphon: ANTIPHON_TEST_SEED={SEED}; hypothesis {chance}; ANTIPHON_CI={int(IN_CI)}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order tests by folder, quick ones first; within a folder as collected, but for the long files.

    Those marked `long` are left out unless they were asked for; `long(in_ci=True)` are there in CI, where
    they share the processors with all others.
    """
    everything = [Path(word).resolve() for word in config.args] == [Path(__file__).parent]
    if everything and not config.getoption("--long"):
        left_out = [item for item in items if _too_long(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _too_long(item)]
    tests = Path(__file__).parent

    def rank(item: pytest.Item) -> tuple[int, int]:
        if not item.path.is_relative_to(tests):  # an example in a module's own text
            return len(ORDER), 0
        file = item.path.relative_to(tests)
        folder, name = file.parts[0], file.as_posix()
        if name in LONGEST:
            return len(ORDER) + 1, LONGEST.index(name)
        if name in LONG:
            return ORDER.index("core"), 1 + LONG.index(name)
        return ORDER.index(folder) if folder in ORDER else len(ORDER), 0

    items.sort(key=rank)


def _too_long(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("long")
    return mark is not None and not (IN_CI and mark.kwargs.get("in_ci", False))


def pytest_collection_finish() -> None:
    collect_as_usual()


class ByFile(LoadFileScheduling):
    """Hands out the tests file by file, those of one run and those of one engine's import together.

    The first process begins with the longest, which mostly wait, the others with the quick ones, which
    compute; so the processors are busy throughout, and no long one is left at the end.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        together = (name for name, files in ONE_PROCESS.items() if file.removeprefix("tests/") in files)
        return next(together, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Use `ByFile` where files are handed out."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


class Processors:
    """Tells which files took most CPU seconds, of the processes they waited for too, beside `--durations`.

    Where the processors are busy throughout, it is these that make a run of all tests long.
    """

    def __init__(self) -> None:
        self._before, self._files = 0.0, Counter[str]()

    def pytest_collection_finish(self) -> None:
        self._before = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._before = self._before, _cpu_seconds()
        report.cpu_s = self._before - before  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files[report.nodeid.partition("::")[0]] += getattr(report, "cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if shown := terminalreporter.config.getoption("durations"):
            terminalreporter.section(f"most CPU seconds, {self._files.total():.0f} in all")
            for file, taken in self._files.most_common(shown):
                terminalreporter.write_line(f"{taken:8.2f}s {file}")


def _cpu_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Processors())


@pytest.fixture(scope="module", autouse=True)
def what_was_loaded_is_no_garbage() -> None:
    """DeepSpeed collects three times for a learner, others as they like, in a process with much in it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Undo what a command called within a test did to the logs: its stream ends with the test."""
    yield
    structlog.reset_defaults()
    if PRELOADED is None:  # vLLM puts a library there for its own children; commands of tests are none
        os.environ.pop("LD_PRELOAD", None)
    else:
        os.environ["LD_PRELOAD"] = PRELOADED


@pytest.fixture(scope="session")
def test_seed() -> int:
    """Return the seed of this run, for tests that draw their own numbers."""
    return SEED


@pytest.fixture(scope="session")
def needs_system() -> Callable[[str], str]:
    """Return a function that finds a system package's program, or ends the test by naming the package.

    A missing package skips the test on a person's machine and fails it in CI, where
    `scripts/system-packages` should have had it installed.
    """

    def find(package: str) -> str:
        for program in PROGRAMS[package]:
            if path := find_initdb() if program == "initdb" else shutil.which(program, path=SEARCHED):
                return path
        reason = f"needs the system package {package} (scripts/system-packages --test)"
        if IN_CI:
            pytest.fail(reason)
        pytest.skip(reason)

    return find


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a finished run of an older version, in a home of its own.

    It took six steps on real engines, with `loop.order=auto`, an order that is no more.
    """
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    shutil.unpack_archive(Path(__file__).with_name("golden") / "run-of-november.tar.gz", tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    return folder
