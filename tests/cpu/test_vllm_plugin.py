"""The plugin replaces what is broken in vLLM by what is right, where version and platform say so."""

import os
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cpu import vllm_plugin as p
from antiphon.services.rollout.engine.environment import PLUGIN, EngineSettings, prepare_environment


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 4)), max_size=8),
    st.sampled_from([torch.float32, torch.int32, torch.int64]),
)
def test_spread_repeats_every_value_for_its_rows(rows, dtype):
    x = torch.tensor([value for value, _ in rows], dtype=dtype)
    ends = torch.tensor([count for _, count in rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = sum(count for _, count in rows)
    got = p.spread(x, ends, total, replace_from=0, replace_to=1)
    wanted = [(1 if v == 0 else v) for v, (_, n) in zip(x.tolist(), rows, strict=True) for _ in range(n)]
    assert got.dtype == dtype and got.tolist() == wanted
    assert x.tolist() == torch.tensor([value for value, _ in rows], dtype=dtype).tolist()  # untouched


@pytest.mark.parametrize(
    ("version", "on_cpu", "wanted"),
    [("0.32.0", True, True), ("0.32.1+cpu", True, True), ("0.32.0", False, False), ("0.31.9", True, False),
     ("0.33.0", True, False), ("1.32.0", True, False)],
)  # fmt: skip
def test_version_and_platform_decide(version, on_cpu, wanted):
    assert p.concerns(version, on_cpu) is wanted


def test_the_entry_point_names_the_plugin_that_may_load(monkeypatch, tmp_path):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    (entry,) = project["project"]["entry-points"]["vllm.general_plugins"].items()
    name, target = entry
    module, function = target.split(":")
    assert name == PLUGIN and getattr(import_module(module), function) is p.register
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "somebody_else")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare_environment(EngineSettings(model_dir=tmp_path))
    assert os.environ["VLLM_PLUGINS"] == PLUGIN
