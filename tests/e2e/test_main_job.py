"""The main job as a newcomer starts it, once, on every real part, looked at from all sides."""

import json
import random
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import antiphon
from antiphon.core.digests import digest_bytes
from antiphon.lineage.ledger.pins import Ledger, dvc_cache
from antiphon.lineage.ledger.verify import RunCheck, identity
from antiphon.lineage.store.artifact_store import ArtifactStore
from tests.support.damage import files_of_run, flipped
from tests.support.figure_views import check_against_the_journal, check_views
from tests.support.main_job import MAIN_STALENESS as STALENESS
from tests.support.main_job import MAIN_STEPS as STEPS
from tests.support.main_job import Job, all_gone, check_batches, command, typed
from tests.support.plain_vllm import answers

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

FLIP_SEED, FLIPS = 4, 20


def outcome_of(job: Job) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((job.run_dir / "outcome.json").read_text())
    return plain


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def test_nothing_is_left_running(job: Job) -> None:
    assert all_gone(job.home)


def test_the_outcome_says_what_was_done(job: Job) -> None:
    outcome = outcome_of(job)
    commits = job.journal.events("step.committed")
    assert [commit["step"] for commit in commits] == list(range(STEPS))
    figures = outcome["figures"]
    assert figures["steps"] == STEPS
    assert outcome["weights_digest"] == commits[-1]["weights_digest"]
    assert 0.0 <= figures["reward_first"] <= 1.0 and 0.0 <= figures["reward_last"] <= 1.0
    assert outcome["records"]["complete"] is True
    assert set(outcome["restarts"].values()) == {0}
    metrics = json.loads((job.results / "metrics.json").read_text())
    assert [step["batch"] for step in metrics["steps"]] == [commit["batch_digest"] for commit in commits]
    assert all(isinstance(step["loss"], float) and 0 <= step["reward"] <= 1 for step in metrics["steps"])
    assert json.loads((job.results / "final.json").read_text())["weights"] == outcome["weights_digest"]
    assert "report.html" in job.said and "antiphon up" in job.said
    assert not job.complaints()


def test_the_first_screen_is_short_and_no_line_is_wide(job: Job) -> None:
    lines = job.said.splitlines()
    step = re.compile(rf" step \d+/{STEPS} ")  # the first one told may be a later one than 0
    training = next(number for number, line in enumerate(lines) if step.search(line))
    assert training <= 15, lines[:training]
    wide = [line for line in lines if len(line) > 120 and " " in line.strip()]
    assert not wide and "Task run" not in job.said


def test_nothing_is_trained_twice_or_too_old(job: Job) -> None:
    batches = job.batches()
    check_batches(batches, STALENESS)
    histogram = {
        int(staleness): count
        for staleness, count in outcome_of(job)["figures"]["staleness_histogram"].items()
    }
    assert max(histogram) <= STALENESS
    assert sum(histogram.values()) == sum(len(batch) for batch in batches)


def test_the_kept_timeline_shows_the_overlap(job: Job) -> None:
    query = "SELECT name, state_type, start_time, end_time FROM task_run"
    runs = {name: (state, start, end) for name, state, start, end in rows(database_of(job), query)}
    expected = {f"{stage} {t}" for stage in ("collect", "reward", "step") for t in range(STEPS)}
    expected |= {f"broadcast v{version}" for version in range(STEPS + 1)}
    expected |= {"evaluate v0", f"evaluate v{STEPS}"}
    assert set(runs) == expected
    assert {state for state, _, _ in runs.values()} == {"COMPLETED"}
    for t in range(STEPS):
        assert runs[f"collect {t}"][2] <= runs[f"step {t}"][1]
    # What a slow learner's first step waits for may all be sampled by then, but not what its version samples.
    together = [
        (later, t)
        for t in range(STEPS)
        for later in range(t + 1, STEPS)
        if max(runs[f"collect {later}"][1], runs[f"step {t}"][1])
        < min(runs[f"collect {later}"][2], runs[f"step {t}"][2])
    ]
    assert together, runs
    flows = rows(database_of(job), "SELECT name, state_type FROM flow_run")
    assert flows == [(job.run_dir.name, "COMPLETED")]


def database_of(job: Job) -> Path:
    return job.home / "prefect" / "prefect.db"


def test_mlflow_has_every_version_and_batch(job: Job) -> None:
    database = job.home / "mlflow" / "mlflow.db"
    scored = [event["version"] for event in job.journal.events("evaluation.finished")]
    runs = {job.run_dir.name: "FINISHED", **{f"evaluate v{version}": "FINISHED" for version in scored}}
    found = rows(database, "SELECT name, status FROM runs")
    assert {name.rpartition(" · ")[2]: status for name, status in found} == runs
    versions = {name for (name,) in rows(database, "SELECT name FROM logged_models")}
    assert versions == {f"policy-v{version}" for version in range(STEPS + 1)}
    datasets = dict(rows(database, "SELECT name, digest FROM datasets"))
    digests = [commit["batch_digest"] for commit in job.journal.events("step.committed")]
    assert datasets == {f"batch-t{t:06d}": digest[:32] for t, digest in enumerate(digests)}
    told = {
        step for (step,) in rows(database, "SELECT DISTINCT step FROM metrics WHERE key = 'learning/loss'")
    }
    assert len(told) == STEPS
    for name in ("tokens_total", "wall_s", "cost_dollars"):
        found = rows(database, f"SELECT DISTINCT step FROM metrics WHERE key = '{name}'")
        assert {step for (step,) in found} == set(range(STEPS + 1))
    summary = {key for (key,) in rows(database, "SELECT key FROM latest_metrics WHERE key LIKE 'summary/%'")}
    assert summary >= {"summary/wall_s", "summary/staleness_mean", "summary/workers", "summary/reward_last"}


def test_trajectories_of_the_first_version_can_be_read(job: Job) -> None:
    database = job.home / "mlflow" / "mlflow.db"
    shown = rows(database, "SELECT request_preview, response_preview FROM trace_info")
    assert shown and all(prompt and completion for prompt, completion in shown)
    assert rows(database, "SELECT alias FROM registered_model_aliases") == [("champion",)]


def test_the_ledger_pins_every_version_and_batch(job: Job) -> None:
    run_id = job.run_dir.name
    pointer = (job.home / "ledger" / f"{run_id}.pointer").read_text()
    assert f"path: {run_id}" in pointer and ".dir" in pointer
    ledger = Ledger(job.home, "ledger", run_id, kept=False)
    store = ArtifactStore(job.home / "store")
    try:
        assert ledger.unpublished == 0
        for commit in job.journal.events("step.committed"):
            name = f"batches/t{commit['step']:06d}"
            assert ledger.md5(f"{name}.timings.parquet")
            pinned = (ledger.directory / f"{name}.parquet").read_bytes()
            assert pinned == store.get(commit["batch_digest"])
            assert digest_bytes(pinned) == commit["batch_digest"]
        for version in range(STEPS + 1):
            assert ledger.md5(f"versions/v{version:06d}.json")
            assert ledger.md5(f"versions/v{version:06d}.safetensors")
    finally:
        ledger.close()


def test_every_step_replays_from_a_copy_of_the_ledger_alone(job: Job, tmp_path: Path) -> None:
    run_id = job.run_dir.name
    shutil.copytree(job.home / "ledger" / run_id, tmp_path / "copy" / run_id)
    arguments = ("replay", run_id, "--copy", str(tmp_path / "copy"), "--rollouts")
    done = command(tmp_path / "empty", *arguments, timeout_s=240.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{STEPS} of {STEPS} steps of {run_id} repeat bit for bit, from the base model" in done.stdout


def test_one_altered_bit_is_found_and_named(job: Job) -> None:
    sound = typed(job.home, "lineage", job.run_dir.name, "--verify")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    chance = random.Random(FLIP_SEED)
    files = files_of_run(job.home, job.run_dir.name)
    sizes = [path.stat().st_size for path in files]
    with dvc_cache(job.home) as cached:
        for number in range(FLIPS):
            path = chance.choices(files, sizes)[0] if number % 2 else chance.choice(files)
            position, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
            with flipped(path, position, bit):
                place = identity(path)
                found = RunCheck(job.run_dir, job.home / "store").check(job.home / "ledger", cached).findings
            names = [p for finding in found for p in finding.paths if p.exists()]
            assert any(identity(p) == place for p in names), f"seed {FLIP_SEED}, flip {number} of {path}"


def test_every_view_has_the_same_figures(job: Job, tmp_path: Path) -> None:
    figures = check_views(job, tmp_path)
    check_against_the_journal(job, figures)
    assert figures.staleness_max == STALENESS and figures.steps == STEPS


def test_the_report_needs_nothing_else(job: Job) -> None:
    page = (job.run_dir / "report.html").read_text()
    assert job.run_dir.name in page
    loaded = re.sub(r'<a href="http://127\.0\.0\.1:\d+/', '<a href="#', page)  # followed on demand alone
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']+""", loaded)
    assert "@import" not in page


@pytest.mark.long(in_ci=True)
def test_an_exported_version_answers_alike_in_plain_transformers_and_plain_vllm(
    job: Job, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    done = command(job.home, "export", job.run_dir.name, f"v{STEPS}", str(folder))
    assert done.returncode == 0 and str(folder) in done.stdout, done.stderr
    again = command(job.home, "export", job.run_dir.name, str(folder))
    assert again.returncode == 2 and "is not empty" in again.stderr
    model = AutoModelForCausalLM.from_pretrained(folder)
    recorded = load_file(job.home / "ledger" / job.run_dir.name / "versions" / f"v{STEPS:06d}.safetensors")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in recorded.items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.encode(text) for text in ("4 + 9 - 3 =", "1 + 2 + 7 - 5 =")]
    for prompt, answer in zip(prompts, answers(folder, prompts, 24), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        taken = logits[torch.arange(len(answer)), torch.tensor(answer)]
        # Two engines add in different orders: a token may differ only where two are equally likely.
        assert len(answer) > 1 and bool((logits.max(dim=-1).values - taken < 1e-3).all())


def test_the_run_is_listed_and_read_as_tables(job: Job) -> None:
    listed = typed(job.home, "runs", "--json")
    (told,) = json.loads(listed.stdout)
    assert (told["run"], told["state"], told["figures"]["steps"]) == (job.run_dir.name, "finished", STEPS)
    run = antiphon.load_run(home=job.home)
    commits = job.journal.events("step.committed")
    assert list(run.metrics["weights_digest"]) == [commit["weights_digest"] for commit in commits]
    assert list(run.versions.index) == list(range(STEPS + 1))
    assert [len(run.batch(step)) for step in range(STEPS)] == [len(batch) for batch in job.batches()]
    assert run.evaluations["reward_mean"].iloc[-1] == outcome_of(job)["figures"]["reward_last"]


def test_samples_show_what_the_first_and_the_last_version_answered(job: Job) -> None:
    for version in (0, STEPS):
        shown = typed(job.home, "evaluate", job.run_dir.name, f"v{version}", "--samples", "--json")
        assert shown.returncode == 0, shown.stderr
        found = [sample for sample in json.loads(shown.stdout) if sample["split"] == "heldout"]
        assert {sample["kept_as"] for sample in found} >= {"best", "worst"}
        assert all(sample["prompt"].rstrip().endswith("=") and sample["reason"] for sample in found)
        for sample in found:
            assert (sample["reward"] == 1.0) == sample["reason"].endswith("is right")
    page = (job.run_dir / "report.html").read_text()
    assert "What it answers" in page and f"version {STEPS}" in page
    lines = typed(job.home, "evaluate", "--samples").stdout.splitlines()
    assert lines[0] == f"run {job.run_dir.name}, version {STEPS}" and any("  reason  " in x for x in lines)


def test_status_report_and_evaluate_answer_afterwards(job: Job, tmp_path: Path) -> None:
    run_id = job.run_dir.name
    status = typed(job.home, "status", "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["run_id"] == run_id
    report = typed(job.home, "report", run_id, "--out", str(tmp_path / "page.html"))
    assert (report.returncode, report.stdout) == (0, f"{tmp_path / 'page.html'}\n"), report.stderr
    assert run_id in (tmp_path / "page.html").read_text()
    scores = typed(job.home, "evaluate", run_id, "--results", str(tmp_path / "scores.json"))
    assert scores.returncode == 0, scores.stderr
    told = json.loads((tmp_path / "scores.json").read_text())
    assert [entry["version"] for entry in told["evaluations"]] == [0, STEPS]
    assert told["evaluations"][-1]["pass_at_1"] == outcome_of(job)["figures"]["reward_last"]
    unknown = typed(job.home, "evaluate", run_id, "--version", "3")
    assert unknown.returncode == 2
    assert unknown.stderr.splitlines()[-1].endswith(f"evaluated versions: 0, {STEPS}")
    assert all_gone(job.home)
