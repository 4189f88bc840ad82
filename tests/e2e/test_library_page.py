"""The code of docs/guides/library.md, run as a notebook's kernel runs its cells: within an event loop."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support.main_job import PROJECT, SMALL, all_gone, make_home

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

PAGE = PROJECT / "docs" / "guides" / "library.md"


def test_the_pages_cells_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home(tmp_path)
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANTIPHON_HOME", str(home))
    cells = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(cells) == 3 and '"run.steps=20"' in cells[0]
    small = ("run.steps=2", *SMALL, "record.mlflow=false")
    cells[0] = cells[0].replace('"run.steps=20"', ", ".join(map(repr, small)))
    names: dict[str, Any] = {}

    async def kernel() -> None:
        for cell in cells:
            exec(compile(cell, str(PAGE), "exec"), names)

    asyncio.run(kernel())
    run, exported = names["run"], names["exported"]
    assert run.finished and list(run.metrics.index) == [0, 1]
    assert f"run {run.id}" in capsys.readouterr().out
    assert exported.weights_digest == run.versions.loc[exported.version, "weights_digest"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "my-model").num_parameters() > 1000
    assert all_gone(home)
