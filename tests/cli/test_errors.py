"""The command line says what is wrong in one sentence, with the exit code that fits."""

import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.cli import app as cli
from antiphon.cli.arguments import check_address
from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.execute(arguments)
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("antiphon: ")
    return code, lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["config", QUICKSTART, "loop.max_stalness=3"], "did you mean loop.max_staleness?"),
        (["config", QUICKSTART, "loop.max_staleness=-1"], "loop.max_staleness=-1 is not possible"),
        (["config", QUICKSTART, "loop.max_staleness"], "write loop.max_staleness=2"),
        (
            ["config", QUICKSTART, "loop.mode=fixed", "loop.publish_interval=4", "loop.max_staleness=2"],
            "needs loop.max_staleness >= 3",
        ),
        (["config", QUICKSTART, "algorithm.correction_floor=3"], "correction_floor=3 is above"),
        (["config", QUICKSTART, "learner.warmup_steps=60"], "no shorter than run.steps=60"),
        (["config", "no-such.yaml"], "there is no configuration file at no-such.yaml"),
        (["run", "no-such.yaml"], "there is no configuration file at no-such.yaml"),
        (["demo", "sampling.max_tokens=100000"], "raise the latter"),
        (["sing"], 'Unknown command "sing"'),
        (["run"], "antiphon run --help"),
        (["status", "--colour"], "Unknown option"),
        (["worker", "--coordinator", "somewhere"], "write 127.0.0.1:7700"),
        (["worker", "--coordinator", "host:1", "--name", "a b"], "--name a b is not possible"),
        (["serve", "learner", "--config", QUICKSTART], "serve learner needs --coordinator HOST:PORT"),
        (["serve", "reward", "--config", QUICKSTART, "--coordinator", "x"], "not of the form HOST:PORT"),
        (["serve", "coordinator", "--config", "no-such.yaml"], "there is no configuration file"),
        (["status"], "start one with `antiphon demo`"),
        (["report", "nobody"], "there is no run nobody"),
        (["evaluate", "nobody"], "there is no run nobody"),
        (["warmstart"], "needs either --out DIR"),
    ],
)
def test_usage_and_configuration_errors(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = complaint(arguments, capsys)
    assert code == 2
    assert says in line


def test_nothing_is_written_when_a_command_is_refused(
    empty_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complaint(["run", QUICKSTART, "loop.max_staleness=-1"], capsys)
    complaint(["serve", "learner", "--config", QUICKSTART], capsys)
    assert not empty_home.exists()


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError("a=1 is wrong"), 2, "antiphon: a=1 is wrong"),
        (UnavailableError("nobody answers"), 1, "antiphon: nobody answers"),
        (AntiphonError("it failed"), 1, "antiphon: it failed"),
        (KeyboardInterrupt(), 130, "antiphon: interrupted"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            1,
            "no space is left on the disk for /x/y",
        ),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    found, line = complaint(["status"], capsys)
    assert found == code
    assert says in line


def test_other_operating_system_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(OSError, match="I/O error"):
        cli.execute(["status"])


def test_up_refuses_a_taken_port_and_starts_nothing(
    empty_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line = complaint(["up", "--prefect-port", "0", "--mlflow-port", str(port)], capsys)
    assert code == 2
    assert f"port {port} on 127.0.0.1 is taken" in line and "--mlflow-port" in line
    assert not (empty_home / "up.json").exists()


def test_down_without_up_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["down"]) == 0
    assert "nothing was up" in capsys.readouterr().out


def test_config_prints_a_tree_that_reads_back_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute(["config", QUICKSTART, "loop.max_staleness=4"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(first)
    assert cli.execute(["config", str(tmp_path / "again.yaml")]) == 0
    assert capsys.readouterr().out == first
    assert "max_staleness: 4" in first


def test_addresses() -> None:
    assert check_address("[::1]:80", "--coordinator") == "[::1]:80"
    for wrong in ("", "host", "host:", ":80", "host:0", "host:70000", "host:1x"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            check_address(wrong, "--coordinator")


def test_help_imports_nothing_heavy() -> None:
    heavy = "prefect torch vllm mlflow grpc deepspeed transformers dvc pyarrow sqlalchemy"
    program = (
        "import sys; sys.argv = ['antiphon', '--help']\n"
        "from antiphon.cli.app import execute\n"
        "code = execute(['--help'])\n"
        f"late = [name for name in {heavy.split()!r} if name in sys.modules]\n"
        "print(code, late)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_the_command_itself_reports_its_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "antiphon.cli.app", "config", "no-such.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("antiphon: there is no configuration file")
    assert done.stdout == ""


def test_a_key_that_cannot_act_is_named_beside_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["config", QUICKSTART]) == 0
    assert not capsys.readouterr().err
    assert cli.execute(["config", QUICKSTART, "algorithm.clip_high=0.4"]) == 0
    captured = capsys.readouterr()
    assert "clip_high: 0.4" in captured.out
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("note: algorithm.clip_high cannot act: with algorithm.updates_per_step=1")
