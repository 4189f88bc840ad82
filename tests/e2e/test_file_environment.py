"""A run on prompts from a file with a score function of one's own: real engines, the sandbox, the record."""

import json
from pathlib import Path

import pytest

from antiphon.lineage.run_log import read_steps
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.main_job import PROJECT, SMALL, command, make_home
from tests.support.standing import Standing

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(400)]
STEPS = 2
SCORE = """
import re

def near(text, row):
    found = re.search(r"<answer>(-?[0-9]{1,9})</answer>", text)
    return 1 / (1 + abs(int(found[1]) - int(row["answer"]))) if found else 0.0
"""


def test_a_run_trains_on_a_file_and_is_held_to_it(
    standing: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_bubblewrap()
    code, home = tmp_path / "code", make_home(tmp_path)
    code.mkdir()
    (code / "my_scores.py").write_text(SCORE)
    monkeypatch.setenv("PYTHONPATH", str(code))
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "heldout")}
    for split, path in files.items():
        path.write_bytes((PROJECT / "examples" / "file" / f"{split}.jsonl").read_bytes())
    parameters = {**{split: str(path) for split, path in files.items()}, "score": "my_scores:near"}
    words = [
        "environment.name=file",
        f"environment.parameters={json.dumps(parameters)}",
        "environment.train_size=null",
        "environment.heldout_size=null",
        f"run.steps={STEPS}",
        "record.mlflow=false",
        *SMALL,
    ]
    job = standing.start(home, words)
    try:
        assert job.wait() == 0, job.everything()
        steps = read_steps(job.run_dir)
        assert len(steps) == STEPS and all(step["batch"]["trajectories_failed"] == 0 for step in steps)
        rows = [row for batch in job.batches() for row in batch]
        assert any(0.0 < row.reward < 1.0 for row in rows), "what is near is worth something"
        questions = [json.loads(line)["question"] for line in files["train"].read_text().splitlines()]
        assert {int(row.prompt_key.rpartition("-")[2]) for row in rows} <= {*range(len(questions))}
        manifest = json.loads((job.run_dir / "manifest.json").read_text())
        assert manifest["config"]["environment"]["train_size"] == len(questions)
        assert manifest["environment"]["class"] == "my_scores:near" and "heldout" in manifest["environment"]
        files["train"].write_text(files["train"].read_text() + '{"question": "1 + 1 =", "answer": "2"}\n')
        again = command(job.home, "replay", job.run_dir.name, "--step", "0", timeout_s=200.0)
        assert again.returncode == 0, again.stderr
        assert "bit for bit" in again.stdout and "the environment was my_scores:near (" in again.stdout
    finally:
        job.close()
