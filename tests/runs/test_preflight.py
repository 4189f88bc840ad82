"""Prompts that a tokenizer cannot say are refused before anything starts."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from antiphon.core.config import RunConfig, build_config, load_config
from antiphon.core.errors import ConfigError
from antiphon.core.records import Prompt
from antiphon.core.reporting.run_display import RunDisplay
from antiphon.environments.environment import Environment, Problem
from antiphon.environments.registry import environment_of, make_environment, with_sizes
from antiphon.flows.local_run import run_post_train
from antiphon.models.codec import TextCodec, resolve_model_path
from antiphon.runs.preflight import (
    check_characters,
    check_disk,
    check_gateway,
    check_model,
    check_patience,
    check_scoring,
    check_shared_memory,
    preflight,
)
from antiphon.services.coordinator.prompts import client_prompts, load_prompts
from tests.support.bubblewrap import needs_bubblewrap

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NO_LEDGER = ["record.dvc=false"]
TASK = """
import os, threading
from pathlib import Path
from antiphon.environments.generated import GeneratedEnvironment

class Task(GeneratedEnvironment):
    def draw(self, random):
        return f"{{random.integers(10**6)}} =", "1"
    def score(self, problem, completion):
        {score}
        return 1.0
"""


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(resolve_model_path("examples/models/chain-sum"))


def test_the_share_the_first_character_and_its_prompt_are_named(codec: TextCodec) -> None:
    problems = [Problem("train-0-0", "1 + 2 =", "3"), Problem("train-0-1", "1 + Q =", "?")]
    check_characters(problems[:1], codec, 0.0)
    with pytest.raises(ConfigError) as refused:
        check_characters(problems, codec, 0.1)
    said = str(refused.value)
    assert "12.5% of the prompts' characters" in said
    assert "the first is 'Q' in train-0-1: '1 + Q ='" in said
    assert "environment.max_lost_share=0.1" in said
    check_characters(problems, codec, 0.125)


def test_another_task_is_refused_for_the_small_model_unless_it_is_accepted(tmp_path: Path) -> None:
    task = ["environment.name=reasoning/spell_backward", "environment.parameters={}", *NO_LEDGER]
    task.append("reward.sandbox=process")
    with pytest.raises(ConfigError, match=r"'S' in train-0-0: 'Spell this word backward"):
        preflight(load_config(EXAMPLES / "quickstart.yaml", task), tmp_path)
    preflight(load_config(EXAMPLES / "quickstart.yaml", [*task, "environment.max_lost_share=1"]), tmp_path)


@pytest.mark.parametrize("name", ["quickstart", "gspo", "clipped_updates"])
def test_the_examples_lose_nothing(name: str, tmp_path: Path) -> None:
    preflight(load_config(EXAMPLES / f"{name}.yaml", NO_LEDGER), tmp_path)


def test_a_run_of_a_client_is_checked_without_a_task_and_refused_where_one_is_needed(tmp_path: Path) -> None:
    driven = with_sizes(
        load_config(
            EXAMPLES / "quickstart.yaml", ["environment={name: client}", "loop.mode=elastic", *NO_LEDGER]
        )
    )
    preflight(driven, tmp_path / "home")
    with pytest.raises(ConfigError, match=r"max_model_tokens=1025 is more than the 1024 positions"):
        preflight(build_config(changed(driven, "rollout", max_model_tokens=1025)), tmp_path)
    for refuse in (
        lambda: environment_of(driven.environment),
        lambda: run_post_train(driven, None, tmp_path, RunDisplay()),
    ):
        with pytest.raises(ConfigError, match=r"environment\.name=client .* is served by `antiphon door`"):
            refuse()
    prompts = client_prompts(driven)
    assert prompts.rules.vocabulary > 0 and prompts.rules.end_tokens
    codec = TextCodec.load(resolve_model_path("examples/models/chain-sum"))
    assert prompts.stops(("+",))(codec.encode("1 + 2 + 3")) == 2
    with pytest.raises(ConfigError, match="a client brings the prompts"):
        prompts.prompt("train", 0)


def changed(config: RunConfig, section: str, **values: object) -> dict[str, object]:
    tree = config.model_dump(mode="json")
    return {**tree, section: {**tree[section], **values}}


def test_a_model_is_checked_against_its_own_configuration_and_the_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))  # transformers is asked once
    model = Path(shutil.copytree(EXAMPLES / "models" / "chain-sum", tmp_path / "model"))

    def checked(**values: object) -> list[str]:
        path = model / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
        return check_model(load_config(EXAMPLES / "quickstart.yaml", [f"model.path={model}"]), model)

    assert checked() == []
    (said,) = checked(eos_token_id=[2])
    assert "[1] in tokenizer_config.json, [2] in generation_config.json, [1] in config.json" in said
    save_file({"model.norm.weight": np.ones(128, np.float32)}, model / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"embed_tokens\.weight is missing, .* 31 more, .* copy the model again"
    ):
        checked()
    long = load_config(EXAMPLES / "quickstart.yaml", ["rollout.max_model_tokens=1025"])
    with pytest.raises(ConfigError, match=r"max_model_tokens=1025 is more than the 1024 positions"):
        check_model(long, EXAMPLES / "models" / "chain-sum")
    shutil.copytree(EXAMPLES / "models" / "chain-sum", teacher := tmp_path / "teacher")
    (teacher / "config.json").write_text((teacher / "config.json").read_text().replace(": 1024", ": 64"))
    told = [*NO_LEDGER, "reference.kl=0.1", f"reference.model={teacher}"]
    taught = load_config(EXAMPLES / "quickstart.yaml", told)
    with pytest.raises(ConfigError, match=r"is more than the 64 positions of reference\.model=.*teacher"):
        preflight(taught, tmp_path)


def test_too_little_shared_memory_is_named_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_shared_memory(tmp_path / "none")
    check_shared_memory(tmp_path)
    monkeypatch.setattr("antiphon.runs.preflight.SHARED_BYTES", 1 << 60)
    with pytest.raises(
        ConfigError, match=r"has \d+ KiB free of \d+ KiB, and engines need \d+ MiB; .*--shm-size"
    ):
        check_shared_memory(tmp_path)


def test_variables_of_vllm_that_would_overrule_the_configuration_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "900")
    (said,) = preflight(load_config(EXAMPLES / "quickstart.yaml", NO_LEDGER), tmp_path)
    assert said == "VLLM_CPU_KVCACHE_SPACE is not used: the configuration decides"


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ("threading.Thread(target=len).start()", "RuntimeError: can't start new thread"),
        ("Path({data!r}).read_text()", "FileNotFoundError: .*qa.jsonl'"),
        ("return 0.5", None),
    ],
)
def test_a_scorer_is_tried_where_the_run_scores(
    score: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_bubblewrap()
    data = tmp_path / "data" / "qa.jsonl"
    data.parent.mkdir()
    data.write_text("{}")
    config, environment = tried_task(score.format(data=str(data)), tmp_path, monkeypatch)
    if words is None:
        check_scoring(config, environment)
        return
    with pytest.raises(ConfigError, match=f"train-0-0 was not scored .*{words}.* no thread"):
        check_scoring(config, environment)


def tried_task(
    score: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **reward: object
) -> tuple[RunConfig, Environment]:
    """Return a run with a class of one's own that does this with an answer before it pays 1."""
    module = f"tried_{abs(hash((score, str(folder))))}"
    (folder / "code").mkdir()
    (folder / "code" / f"{module}.py").write_text(TASK.format(score=score))
    monkeypatch.setenv("PYTHONPATH", str(folder / "code"))
    monkeypatch.syspath_prepend(str(folder / "code"))
    config = build_config({"environment": {"name": f"{module}:Task", "parameters": {}}, "reward": reward})
    section = config.environment
    return config, make_environment(section.name, {}, section.seed, section.train_size, 8)


def test_decoys_are_scored_where_the_run_scores_and_have_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what pays in this process alone nor what hangs is met by the process that starts the run."""
    score = f"""if os.getpid() != {os.getpid()}:
            if "nan" in completion and problem.key == "train-0-0":
                threading.Event().wait()
            return 0.0"""
    limits = {"sandbox": "process", "answer_timeout_s": 0.5, "attempts": 1}
    config, environment = tried_task(score, tmp_path, monkeypatch, **limits)
    (said,) = check_scoring(config, environment)
    assert "no reference answers that earn anything" in said


def test_bubblewrap_is_missed_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    environment = make_environment("reasoning/countdown", {}, 0, 8, 8)
    tree: dict[str, dict[str, object]] = {"environment": {"name": "reasoning/countdown", "parameters": {}}}
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        check_scoring(build_config(tree), environment)
    check_scoring(build_config(tree | {"reward": {"sandbox": "process"}}), environment)
    check_scoring(build_config({}), make_environment("reasoning/chain_sum", {}, 0, 8, 8))


def test_prompts_that_take_longer_than_the_start_may_are_named_with_their_seconds() -> None:
    config = load_config(EXAMPLES / "quickstart.yaml", ["environment.train_size=5000000"])
    assert check_patience(config, 1.0) == []
    (said,) = check_patience(config, 100.0)
    assert said.startswith("environment.train_size=5000000: making all prompts") and "about 100 s" in said
    with pytest.raises(ConfigError, match=r"about 6,000 s here, more than services\.start_timeout_s="):
        check_patience(config, 6000.0)


@pytest.mark.parametrize(
    ("overrides", "steps", "free", "words"),
    [
        ([], 60, 10e9, ""),
        ([], 60, 30e6, "make room, or keep fewer weights"),
        ([], 60_000, 1e12, "GB of records at the end: weights"),
        (["record.weights=last"], 60, 300e6, ""),
        (["record.weights=last", "learner.lora.rank=4"], 60, 100e6, ""),
    ],
)
def test_the_disk_that_records_need_is_said_before_the_start(
    overrides: list[str], steps: int, free: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(EXAMPLES / "quickstart.yaml", [f"run.steps={steps}", *overrides])
    model = Path(resolve_model_path(config.model.path)).resolve()
    (tmp_path / ".dvc").mkdir()
    monkeypatch.chdir(tmp_path)
    said = check_disk(config, model, tmp_path, int(free))
    assert bool(said) == bool(words) and (not words or words in said[0])


def test_what_hosts_need_is_looked_at_before_a_run() -> None:
    def hosted(**tree: object) -> RunConfig:
        return build_config({"environment": {"name": "host", "host_command": [sys.executable]}, **tree})

    check_gateway(hosted())
    with pytest.raises(ConfigError, match=r"gateway\.address=0\.0\.0\.0 would serve without encryption"):
        check_gateway(hosted(gateway={"address": "0.0.0.0"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken.*gateway.port"):
            check_gateway(hosted(gateway={"port": port}))
    command = {"name": "host", "host_command": ["no-such-host"]}
    with pytest.raises(ConfigError, match="begins with 'no-such-host', which is no program here"):
        check_gateway(hosted(environment=command))


def test_prompts_of_hosts_are_empty_and_their_rows_may_be_longer_than_a_context() -> None:
    tree = {"model": {"path": "examples/models/turns"}, "environment": {"name": "host"}}
    tree["environment"] |= {"max_trajectory_tokens": 4000, "reward_range": [-2, 2]}
    prompts = load_prompts(build_config(tree))
    assert prompts.hosted and prompts.prompt("train", 3) == Prompt("train-0-3", ())
    assert prompts.limits is not None and prompts.limits.tokens == 4000
    assert prompts.reward_range == (-2.0, 2.0)
    with pytest.raises(ConfigError, match=r"overlong_margin_tokens does not fit an environment with turns"):
        load_prompts(build_config({**tree, "algorithm": {"overlong_margin_tokens": 1}}))
    tree["environment"] |= {"reward_range": [2, -2]}
    with pytest.raises(ConfigError, match="is no pair"):
        load_prompts(build_config(tree))


@pytest.mark.parametrize(
    "override, words",
    [
        ("rollout.graphs=full", "rollout.graphs=full needs a GPU, and engines here run on the CPU"),
        ("rollout.memory_share=0.5", "rollout.memory_share=0.5 needs a GPU"),
        ("learner.devices=[0]", "names GPU 0, and this machine has no GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(override: str, words: str) -> None:
    config = load_config(EXAMPLES / "quickstart.yaml", [override])
    with pytest.raises(ConfigError, match=words):
        check_model(config, Path(resolve_model_path(config.model.path)))
