"""lineage: what an artifact came from and what came of it; and whether all of it is still as recorded."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from antiphon.cli.arguments import Json, columns
from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.lineage.documents.graph import (
    LineageGraph,
    Node,
    all_documents,
    build_graph,
    means_artifact,
    summed,
)
from antiphon.lineage.layout import (
    find_project,
    keeps_no_ledger,
    kept_pointer_of,
    ledger_names,
    shard_directories,
)
from antiphon.lineage.names import version_entry
from antiphon.lineage.run_log import BASE_FILE
from antiphon.runs.directory import home_directory, list_runs, store_directory
from antiphon.runs.finding import find_artifacts, find_run, ledger_folders, missing_run, pulled_runs
from antiphon.system.logs import configure_logs

if TYPE_CHECKING:
    from antiphon.lineage.ledger.verify import Verification

SHOWN_DIGITS = 16
"""Digits of a digest that are printed; any few of them find the artifact again."""
MOST_LINES = 24
"""Parents or children listed one by one; more are summed up. --json has all."""


def lineage(
    *words: str,
    verify: bool = False,
    verify_version: int | None = None,
    as_json: Json = False,
) -> None:
    """Show what an artifact came from, or check that all are as recorded.

    Args:
        words: a run's id (by default the newest run), then what to show of it: v12, batch 7,
            evaluation 10, code, machine, model, train, heldout, or the first digits of a digest.
        verify: instead, read every artifact of the run and compare it with its digest; without
            a run, of all runs, of every ledger that is here, and the whole store. What ended before
            anything was recorded is left out; nothing to verify is an error. Of a named run that keeps
            only some weights (record.weights), one version that it does not keep is made again by replay.
        verify_version: with --verify, the version that is made again; by default one in the middle.
        as_json: print one JSON document.
    """
    home = home_directory()
    named, rest = _split(home, words)
    if verify_version is not None and not (verify and named):
        raise ConfigError("--verify-version names a version for --verify of one run; give both, RUN --verify")
    if verify:
        _verify(home, named, rest, as_json)
        return _prove(home, named, verify_version, as_json)

    pulled = None if named is None else pulled_runs(home).get(named)
    run_dir = find_run(home, named) if pulled is None else home / "runs" / str(named)
    project, folder = ledger_of(run_dir, home)
    ledger = pulled or (None if project is None else project / folder)
    graph = build_graph(all_documents(run_dir, ledger))
    node = graph.find(" ".join(rest) or "run")
    if as_json:
        print(json.dumps(_plain(graph, node, run_dir.name), indent=2, sort_keys=True))
    else:
        print("\n".join(_lines(graph, node, run_dir.name)))


def _split(home: Path, words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the run that words begin with, if they do, and the artifact that the others mean."""
    if not words:
        return None, words
    first, artifact = words[0], " ".join(words)
    is_run = (home / "runs" / first / "config.yaml").exists() or (
        "-" in first and not first.startswith("held-")
    )
    # Or a run that is unknown, which is then said.
    if is_run or (means_artifact(" ".join(words[1:])) and not means_artifact(artifact)):
        return first, words[1:]
    return None, words


@dataclass(frozen=True, slots=True)
class Verified:
    """What was looked at: what was found, or why it was left out."""

    what: str
    result: "Verification | None"
    left_out: str = ""


def verify_all(home: Path, run_id: str | None) -> list[Verified]:
    """Verify one run, or every run, every ledger that is here, and the whole store.

    A run that ended before anything was recorded is left out, and so is a ledger of which only the ``.dvc``
    file is here.

    Raises:
        AntiphonError: when there was nothing to verify.
        ConfigError: when there is no such run.
    """
    from antiphon.lineage.ledger.verify import verify_store

    ledgers = {name: folder for folder in ledger_folders(home) for name in ledger_names(folder)}
    runs = [directory.name for directory in list_runs(home)]
    if run_id is not None and run_id not in (*runs, *ledgers):
        raise ConfigError(missing_run(home, run_id))
    names = [*runs, *sorted(ledgers.keys() - set(runs))] if run_id is None else [run_id]
    found = [_verified(home, name, None if name in runs else ledgers[name]) for name in names]
    if run_id is None:
        found.append(Verified("the store", verify_store(store_directory(home))))
    if not any(entry.result and entry.result.files for entry in found):
        reasons = "; ".join(entry.left_out for entry in found if entry.left_out)
        raise AntiphonError(
            f"there is nothing to verify: {reasons or f'{home} has no run, and no ledger is here'}"
        )
    return found


def ledger_of(run_dir: Path, home: Path) -> tuple[Path | None, str]:
    """Return the DVC project of a run's ledger, None where it keeps none, and the folder in it."""
    path = run_dir / "config.yaml"
    record = (load_config(path) if path.exists() else RunConfig()).record
    return (None if keeps_no_ledger(record, run_dir) else find_project(None, home)), record.ledger


def _verified(home: Path, name: str, ledgers: Path | None) -> Verified:
    """Verify a run of this machine, or one that only has a ledger in the folder `ledgers`."""
    from antiphon.lineage.ledger.verify import verify_run

    run_dir, what = home / "runs" / name, f"{'run' if ledgers is None else 'ledger'} {name}"
    if ledgers is None:
        project, folder = ledger_of(run_dir, home)
    else:
        project = find_project(None, home)
        folder = str(ledgers.relative_to(project))
    shards = [] if project is None else shard_directories(project / folder, name)
    if not run_dir.is_dir() and not any(shard.is_dir() for shard in shards):
        brings = f"`dvc pull {kept_pointer_of(shards[0])}` brings it"
        return Verified(what, None, f"{what} was not pulled: {brings}")
    begun = (run_dir / BASE_FILE).exists() or any((shard / version_entry(0)).exists() for shard in shards)
    if run_dir.is_dir() and not begun:
        return Verified(what, None, f"{what} ended before anything was recorded")
    return Verified(what, verify_run(run_dir, store_directory(home), project, folder))


def _verify(home: Path, named: str | None, rest: tuple[str, ...], as_json: bool) -> None:
    if rest:
        raise ConfigError(f"--verify checks whole runs; leave out {' '.join(rest)!r}")
    found = verify_all(home, named)
    checked = [(entry.what, entry.result) for entry in found if entry.result is not None]
    if as_json:
        print(json.dumps([_plain_result(what, result) for what, result in checked], indent=2))
    aside = sys.stderr if as_json else sys.stdout
    for what, result in checked:
        for finding in () if as_json else result.findings:
            print(finding.sentence)
        if not result.findings and result.files:
            size = result.bytes / 1e6
            print(f"{result.files} files ({size:.1f} MB) of {what} are as recorded", file=aside)
    for entry in found:
        if entry.left_out:
            print(f"left out: {entry.left_out}", file=aside)
    for what, result in checked:
        result.require_sound(what)


def _prove(home: Path, named: str | None, wanted: int | None, as_json: bool) -> None:
    """Make one version again that is recorded by its digest alone; without a run, or such a version, none."""
    if named is None or ledger_of(home / "runs" / named, home)[0] is None:
        return
    artifacts, own = find_artifacts(home, named, None)
    others = artifacts.recorded_by_digest()
    if wanted is not None and wanted not in others:
        listed = f"from v{others[0]} to v{others[-1]}, {len(others)} in all" if others else "none"
        raise ConfigError(f"--verify-version {wanted} is not recorded by its digest alone; such are {listed}")
    if not others:
        return
    from antiphon.services.learner.replay.steps import weights_of  # torch and DeepSpeed

    configure_logs("warning")
    version = others[len(others) // 2] if wanted is None else wanted

    def tell(said: str) -> None:
        print(said, file=sys.stderr if as_json else sys.stdout, flush=True)

    with weights_of(artifacts, version, own, tell):
        tell(
            f"version {version} came out with the recorded digest {artifacts.weights_digest(version)[:16]}; "
            f"{len(others)} versions of {named} are recorded like it"
        )


def _plain_result(what: str, result: Any) -> dict[str, Any]:
    findings = [asdict(finding) | {"paths": list(map(str, finding.paths))} for finding in result.findings]
    return {"checked": what, "files": result.files, "bytes": result.bytes, "findings": findings}


def _lines(graph: LineageGraph, node: Node, run_id: str) -> Iterable[str]:
    yield f"{node.name} of run {run_id}" if node.kind != "run" else f"run {run_id}"
    yield f"  manifest {node.rel}, digest {node.digest}"
    for field, digest in node.contents.items():
        yield f"  {field.replace('_', ' ')} {digest}"
    yield from (f"  {line}" for line in _said(node))
    yield "came from"
    parents = graph.parents(node)
    yield from _listed([_row(role, parent) for role, parent in parents.items()])
    further = [ancestor for ancestor in graph.ancestors(node) if ancestor not in parents.values()]
    if further:
        yield f"  and through these from {_summed(further)}"
    yield "led to"
    children = graph.children(node)
    if len(children) > MOST_LINES:
        yield f"  {_summed(children)}"
    else:
        yield from _listed([_row(child.name, child) for child in children])


def _said(node: Node) -> Iterable[str]:
    facts = node.facts
    match node.kind:
        case "version":
            if recompute := facts.get("recompute"):
                first, last = recompute["batches"]
                yield (
                    f"where its weights are not kept: made again from version {recompute['from_version']} "
                    f"with batches t{first} to t{last}"
                )
            for name in ("loss", "reward_mean"):
                if name in facts.get("metrics", {}):
                    yield f"{name} {facts['metrics'][name]:.4f} in the step that made it"
        case "batch":
            yield (
                f"{facts.get('trajectories')} trajectories, {facts.get('tokens')} tokens, "
                f"mean reward {facts.get('reward_mean'):.4f}"
            )
        case "evaluation":
            yield f"mean reward {facts['reward_mean']:.4f} over {facts['prompts']} held-out prompts"
        case "code":
            code = facts.get("code", {})
            changed = ", with uncommitted changes" if code.get("modified") else ""
            yield f"revision {code.get('revision', 'unknown')}{changed}"
        case "machine":
            hardware, libraries = facts.get("hardware", {}), facts.get("libraries", {})
            yield f"{hardware.get('cpu')}, {hardware.get('cores')} cores; torch {libraries.get('torch')}"
        case "train split" | "held-out split":
            yield f"{facts.get('size')} prompts of {facts.get('name')}, seed {facts.get('seed')}"
        case "base model":
            yield f"{facts.get('path')}, {len(facts.get('files', {}))} files"


def _row(role: str, node: Node | None) -> tuple[str, str, str]:
    if node is None:
        return role, "missing", "no document of this digest is there"
    contents = next(iter(node.contents.values()), "")
    return role, node.digest[:SHOWN_DIGITS], f"({contents[:SHOWN_DIGITS]})" if contents else ""


def _listed(rows: list[tuple[str, str, str]]) -> Iterable[str]:
    return (f"  {line}" for line in (columns(rows) if rows else ["nothing in this run"]))


def _summed(nodes: list[Node]) -> str:
    return ", ".join([*summed(nodes), *(node.name for node in nodes if node.number is None)])


def _plain(graph: LineageGraph, node: Node, run_id: str) -> dict[str, Any]:
    def brief(other: Node | None, digest: str) -> dict[str, Any]:
        return {
            "digest": digest,
            "name": other.name if other else None,
            "manifest": other.rel if other else None,
            "contents": other.contents if other else {},
        }

    parents = graph.parents(node)
    return {
        "run": run_id,
        "name": node.name,
        "kind": node.kind,
        "number": node.number,
        "manifest": node.rel,
        "digest": node.digest,
        "contents": node.contents,
        "facts": dict(node.facts),
        "parents": {role: brief(parent, node.parents[role]) for role, parent in parents.items()},
        "children": [brief(child, child.digest) for child in graph.children(node)],
        "ancestors": [brief(other, other.digest) for other in graph.ancestors(node)],
    }
