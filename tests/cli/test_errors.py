"""The command line says what is wrong in one sentence, with the exit code that fits."""

import errno
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from antiphon.cli import app as cli
from antiphon.cli.arguments import check_address
from antiphon.cli.up import Page, write_pages
from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "chain-sum"
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


@dataclass(frozen=True)
class Bad:
    """One kind of bad input: what is typed, what is said, and the folder that it is about."""

    arguments: Sequence[str]
    """`{tmp}` stands for a folder of the test."""
    says: Sequence[str]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files of that folder -> content."""
    variables: Mapping[str, str] = field(default_factory=dict)
    code: int = 2


def config(*overrides: str, says: Sequence[str]) -> Bad:
    return Bad(["config", QUICKSTART, *overrides], says)


def written(text: str | bytes, *says: str) -> Bad:
    return Bad(["config", "{tmp}/wrong.yaml"], says, {"wrong.yaml": text})


def model(says: Sequence[str], **changed: str | bytes | None) -> Bad:
    """The demo's model with some files changed or, with None, left out."""
    kept = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
    files = {name: kept.get(name) for name in kept} | {
        name.replace("__", "."): v for name, v in changed.items()
    }
    placed = {f"model/{name}": content for name, content in files.items() if content is not None}
    return Bad(["run", QUICKSTART, "model.path={tmp}/model"], says, placed)


MODEL_CONFIG = json.loads((MODEL / "config.json").read_text())
OTHER_VOCABULARY = json.dumps({**MODEL_CONFIG, "vocab_size": MODEL_CONFIG["vocab_size"] // 4})
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
NO_LEDGER = {"home/.dvc/config": ""}
"""A project of its own, without the ledgers of the one around."""
KNOWN_RUN = {"home/runs/demo-s0-12345678-1/config.yaml": "run: {name: demo}\n"}

BAD: Mapping[str, Bad] = {
    # What a configuration says.
    "unknown key": config("loop.max_stalness=3", says=["did you mean loop.max_staleness?"]),
    "unknown section": config("zzz.steps=3", says=["unknown key zzz; known here: run, model,"]),
    "below its bound": config(
        "loop.max_staleness=-1", says=["loop.max_staleness=-1 is not possible", "at least 0"]
    ),
    "beyond all bounds": config("run.steps=99999999999999999999999", says=["it must be at most 10,000,000"]),
    "no group": config(
        "loop.group_size=1", says=["loop.group_size=1 is not possible: it must be at least 2"]
    ),
    "a negative rate": config(
        "learner.learning_rate=-1", says=["learner.learning_rate=-1", "must be above 0"]
    ),
    "words for a number": config(
        "loop.max_staleness=abc", says=["'abc' is not possible: it must be a whole number"]
    ),
    "a part of a whole": config(
        "run.steps=1.5", says=["run.steps=1.5 is not possible: it must be a whole number"]
    ),
    "endless": config(
        "services.stall_timeout_s=.inf", says=["services.stall_timeout_s=inf", "a finite number"]
    ),
    "no number": config("learner.weight_decay=.nan", says=["learner.weight_decay=nan", "a finite number"]),
    "a year of seconds": config(
        "coordinator.lease_s=1e300", says=["coordinator.lease_s=", "must be at most"]
    ),
    "neither true nor false": config("record.mlflow=perhaps", says=["it must be true or false"]),
    "no choice": config("loop.mode=quick", says=["it must be 'elastic' or 'fixed'"]),
    "a number for a section": config("run=5", says=["run is a section of fields; write run.name=..."]),
    "a word for a list": config("trust.trusted=ada", says=["it must be a list, such as [a, b]"]),
    "a number for keys": config("environment.parameters=3", says=["it must hold keys with values"]),
    "a number for text": config(
        "model.path=5", says=["model.path=5 is not possible: it must be text; quote it"]
    ),
    "a name with blanks": config(
        "run.name=My Experiment", says=["run.name='My Experiment'", "letters a to z"]
    ),
    "a name in other letters": config("run.name=größe", says=["use 1 to 64 of the letters a to z"]),
    "a bound below the interval": config(
        *("loop.mode=fixed", "loop.publish_interval=4", "loop.max_staleness=2"),
        says=["loop.publish_interval=4 needs loop.max_staleness >= 3, but it is 2"],
    ),
    "a floor above the cap": config(
        *("algorithm.correction=mask", "algorithm.correction_floor=3"), says=["correction_floor=3 is above"]
    ),
    "a warm-up as long as the run": config("learner.warmup_steps=60", says=["no shorter than run.steps=60"]),
    "no room for a prompt": Bad(["demo", "sampling.max_tokens=100000"], ["raise the latter"]),
    "groups beyond a message": config(
        "loop.group_size=1024",
        "sampling.max_tokens=9000",
        "rollout.max_model_tokens=9999",
        says=["lower either"],
    ),
    "a sampler that cannot repeat": config(
        "loop.mode=fixed", "sampling.sampler=native", says=["cannot repeat a run in loop.mode=fixed"]
    ),
    "a cut distribution": config("sampling.top_k=5", says=["cut evaluation.top_k instead"]),
    "more prompts than there are": config(
        "evaluation.prompts=5000", says=["exceeds environment.heldout_size"]
    ),
    "a password in an address": config(
        "coordinator.journal_url=postgresql://u:secret@h/d", says=["must not hold a password"]
    ),
    "no store": config("record.artifact_url=ftp://x", says=["is neither s3://bucket/prefix nor"]),
    # How it is written.
    "no override": config("loop.max_staleness", says=["write loop.max_staleness=2"]),
    "an override without a name": config("run..steps=3", says=["is not of the form key=value"]),
    "an override below a value": config("run.steps.more=3", says=["see `./antiphon config`"]),
    "an override that is no YAML": config("run.name=[a", says=["is not a valid YAML value; quote it"]),
    "a key twice": written("run:\n  steps: 3\n  steps: 4\n", "run.steps is set twice, in lines 2 and 3"),
    "a section twice": written(
        "run: {steps: 3}\nloop: {}\nrun: {seed: 1}\n", "run is set twice, in lines 1 and 3"
    ),
    "a value that holds itself": written("environment: {parameters: &a {b: *a}}", "holds itself"),
    "no YAML": written("run: [", "wrong.yaml is not valid YAML", "line 2"),
    "a tab": written("run:\n\tsteps: 3\n", "is not valid YAML", "line 2, column 1"),
    "a list": written("- run\n", "must hold sections, such as run and loop"),
    "no text": written(b"\xff\xfe\x00", "cannot read", "give the path of a YAML file"),
    "a folder for a file": Bad(["config", "{tmp}"], ["cannot read", "Is a directory"]),
    "no file": Bad(["run", "no-such.yaml"], ["there is no configuration file at no-such.yaml"]),
    # Environments and models.
    "an unknown environment": config(
        "environment.name=reasoning/chain_sums", says=["reasoning/chain_sum or "]
    ),
    "an environment like no other": config(
        "environment.name=zzz", says=["`./antiphon environments` lists all"]
    ),
    "a parameter of no task": config("environment.parameters.min_term=3", says=["min_term", "min_terms"]),
    "parameters against each other": config(
        "environment.parameters={min_terms: 9, max_terms: 3}", says=["environment"]
    ),
    "no model": Bad(["run", QUICKSTART, "model.path={tmp}/nowhere"], ["model.path=", "nowhere", "no folder"]),
    "a model without weights": model(["has no model.safetensors"], model__safetensors=None),
    "a model with spoilt weights": model(["model.safetensors cannot be read"], model__safetensors=b"spoilt"),
    "a model without some weights": model(
        ["lacks model-00001-of-00002.safetensors"], **{"model.safetensors.index.json": INDEX}
    ),
    "a model without a tokenizer": model(["has no readable tokenizer.json"], tokenizer__json=None),
    "a model without a shape": model(["has no config.json"], config__json=None),
    "another model's tokenizer": model(
        ["vocab_size=", "the model's own tokenizer"], config__json=OTHER_VOCABULARY
    ),
    "a hub out of reach": Bad(
        ["run", QUICKSTART, "model.path=owner/name"], ["no hub can be asked", "127.0.0.1:9"]
    ),
    "prompts too long": Bad(
        ["run", QUICKSTART, "rollout.max_model_tokens=193"], ["rollout.max_model_tokens"]
    ),
    # Places.
    "a host for everyone": Bad(
        ["run", QUICKSTART, "services.host=0.0.0.0"], ["services.host=0.0.0.0", "127.0.0.1"]
    ),
    "no credentials there": Bad(["run", QUICKSTART, "services.credentials={tmp}/none"], ["none"]),
    "a home that is a file": Bad(
        ["demo"], ["/file cannot be written", "ANTIPHON_HOME"], {"file": ""}, {"ANTIPHON_HOME": "{tmp}/file"}
    ),
    "a home that cannot be made": Bad(
        ["run", QUICKSTART],
        ["/proc/antiphon cannot be written"],
        variables={"ANTIPHON_HOME": "/proc/antiphon"},
    ),
    "pages in such a home": Bad(
        ["up", "--prefect-port", "0", "--mlflow-port", "0"],
        ["/proc/antiphon cannot be written", "ANTIPHON_HOME"],
        variables={"ANTIPHON_HOME": "/proc/antiphon"},
    ),
    "results in a file": Bad(
        ["run", QUICKSTART, "--results", "{tmp}/file"], ["/file cannot", "--results"], {"file": ""}
    ),
    "certificates in such a home": Bad(
        ["invite", "--host", "a.example"], ["/file"], {"file": ""}, {"ANTIPHON_HOME": "{tmp}/file"}
    ),
    # Pages and ports.
    "a port that is none": Bad(["up", "--prefect-port", "99999"], ["--prefect-port 99999 is no port"]),
    "one port for two": Bad(
        ["up", "--prefect-port", "7011", "--mlflow-port", "7011"], ["--mlflow-port 7011", "two ports"]
    ),
    "a spoilt record of pages": Bad(["up"], ["up.json cannot be read"], {"home/up.json": "[1]"}),
    # Runs.
    "no runs yet": Bad(["status"], ["start one with `./antiphon demo`"], NO_LEDGER),
    "an unknown run": Bad(["report", "nobody"], ["there is no run nobody", "there are none yet"], NO_LEDGER),
    "a run that is nearly known": Bad(
        ["status", "demo-s0-12345678-2"], ["did you mean demo-s0-12345678-1?"], KNOWN_RUN
    ),
    "an unknown run's scores": Bad(["evaluate", "nobody"], ["the newest is demo-s0-12345678-1"], KNOWN_RUN),
    "an unknown run's version": Bad(["lineage", "nosuchrun", "v1"], ["there is no run nosuchrun"], KNOWN_RUN),
    "an artifact that is none": Bad(
        ["lineage", "nonsense"], ["'nonsense' names no run and no artifact"], KNOWN_RUN
    ),
    "an unknown run to continue": Bad(["run", QUICKSTART, "--resume", "x"], ["there is no run x"], KNOWN_RUN),
    "another configuration to continue": Bad(
        ["run", QUICKSTART, "--resume", "demo-s0-12345678-1"],
        ["was begun with another configuration"],
        KNOWN_RUN,
    ),
    "steps given twice": Bad(["replay", "--step", "1", "--from", "0"], ["give one or the other"]),
    # The command line.
    "no verb": Bad(["sing"], ['Unknown command "sing"']),
    "a verb misspelt": Bad(["statsu"], ['Did you mean "status"?']),
    "no argument": Bad(["run"], ["antiphon run --help"]),
    "no option": Bad(["status", "--colour"], ["Unknown option"]),
    "a word for a seed": Bad(["demo", "--seed", "many"], ["--seed", "many"]),
    "no address": Bad(["worker", "--coordinator", "somewhere"], ["write 127.0.0.1:7700"]),
    "no name of a worker": Bad(
        ["worker", "--coordinator", "host:1", "--name", "a b"], ["--name a b is not possible"]
    ),
    "a service without a coordinator": Bad(
        ["serve", "learner", "--config", QUICKSTART], ["serve learner needs --coordinator HOST:PORT"]
    ),
    "a service with half an address": Bad(
        ["serve", "reward", "--config", QUICKSTART, "--coordinator", "x"], ["not of the form HOST:PORT"]
    ),
    "a service without a file": Bad(
        ["serve", "coordinator", "--config", "no-such.yaml"], ["there is no configuration file"]
    ),
    "no log level": Bad(
        ["run", QUICKSTART], ["ANTIPHON_LOG=loud is no log level"], variables={"ANTIPHON_LOG": "loud"}
    ),
}


def tree_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_with_its_exit_code_and_leaves_nothing_behind(
    bad: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("antiphon.flows.local_run.begin_prefect_server", begun)
    monkeypatch.setattr("antiphon.system.processes.ChildProcess.__init__", begun)
    monkeypatch.setattr("os.execve", begun)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, content in bad.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, value in bad.variables.items():
        monkeypatch.setenv(name, value.replace("{tmp}", str(tmp_path)))
    before, children = tree_of(tmp_path), {*psutil.Process().children()}
    code, line = complaint([word.replace("{tmp}", str(tmp_path)) for word in bad.arguments], capsys)
    assert code == bad.code, line
    for words in bad.says:
        assert words in line, line
    assert len(line) < 600 and "Input should" not in line
    assert tree_of(tmp_path) == before
    assert {*psutil.Process().children()} <= children


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


def test_pages_that_are_up_elsewhere_are_not_asked_for_another_port(
    empty_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    me = psutil.Process()
    write_pages(empty_home, {"prefect": Page("prefect", "http://127.0.0.1:4200", me.pid, me.create_time())})
    code, line = complaint(["up", "--prefect-port", "4300", "--mlflow-port", "0"], capsys)
    assert (
        code == 2
        and "prefect is up at http://127.0.0.1:4200 already; `./antiphon up --stop` stops it" in line
    )
    assert [path.name for path in empty_home.iterdir()] == ["up.json"]


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


def test_stop_without_up_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["up", "--stop"]) == 0
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
