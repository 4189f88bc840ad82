"""The pipeline file: its stages name known settings, and no stage owns what a run must keep."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from antiphon.core.config import load_config

ROOT = Path(__file__).parents[2]


def stages() -> dict[str, Any]:
    parameters = yaml.safe_load((ROOT / "params.yaml").read_text())

    def value(match: re.Match[str]) -> str:
        section, _, name = match[1].partition(".")
        return str(parameters[section][name])

    text = re.sub(r"\$\{([a-z_.]+)\}", value, (ROOT / "dvc.yaml").read_text())
    found: dict[str, Any] = yaml.safe_load(text)["stages"]
    return found


def test_training_turns_settings_that_exist() -> None:
    words = shlex.split(stages()["train"]["cmd"])
    assert words[:2] == ["antiphon", "run"] and "--fresh" in words
    config = load_config(ROOT / words[2], [word for word in words[3:] if "=" in word])
    assert config.loop.mode == "fixed" and config.model.path == stages()["warmstart"]["outs"][0].popitem()[0]


def test_no_stage_deletes_the_ledger_or_the_runs() -> None:
    for name, stage in stages().items():
        for out in (*stage.get("outs", ()), *stage.get("metrics", ())):
            path, options = next(iter(out.items())) if isinstance(out, dict) else (out, {})
            assert path.startswith("results/") or options.get("persist"), (name, path)


def test_dvc_may_look_where_the_outs_are() -> None:
    hidden = (ROOT / ".dvcignore").read_text().split()
    assert "/results" not in hidden and "/ledger" not in hidden
    git = (ROOT / ".gitignore").read_text().split()
    assert not [rule for rule in git if "ledger" in rule], (
        "a rule above the ledger hides its .dvc files from DVC"
    )
