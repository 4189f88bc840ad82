"""sft: supervised fine-tuning on files, before a run or beside it."""

import json
from pathlib import Path

from antiphon.cli.arguments import Json
from antiphon.core.sft_config import load_sft_config
from antiphon.runs.directory import home_directory, make_home


def sft(path: Path, /, *overrides: str, check: bool = False, as_json: Json = False) -> int:
    """Learn from demonstrations: prompts with completions, or conversations, in files.

    Only what the assistant wrote is learned. The same command continues a training that was interrupted; one
    that is done is only told again. What comes out is a model folder, for model.path of a run.

    Args:
        path: a YAML file, as examples/sft/sums.yaml.
        overrides: key=value pairs, such as data.epochs=2.
        check: only read the files and say what would be learned.
        as_json: print one JSON document.
    """
    from antiphon.runs.sft import MODEL, plan_sft, train

    config, home = load_sft_config(path, list(overrides)), home_directory()
    plan = plan_sft(config, home)
    said = {
        "rows": len(plan.rows),
        "heldout_rows": len(plan.heldout),
        "learned_tokens": plan.tokens,
        "steps": plan.steps,
        "learning_rate": plan.learning_rate,
        "folder": str(plan.folder),
    }
    if not as_json:
        print(
            f"{len(plan.rows):,} rows, {len(plan.heldout):,} held out; {plan.steps:,} steps learn "
            f"{plan.tokens:,} tokens at {plan.learning_rate:g}"
        )
    if check:
        if as_json:
            print(json.dumps(said, indent=2))
        return 0
    make_home(home)

    def told(line: dict[str, float]) -> None:
        if not as_json:
            print(
                f"step {line['step']:.0f}/{plan.steps}: loss {line['loss']:.4f}{_measured(line)}", flush=True
            )

    lines = train(plan, home, told)
    last = lines[-1]
    if as_json:
        print(json.dumps(said | {"model": str(plan.folder / MODEL), "lines": lines}, indent=2))
        return 0
    print(f"loss {lines[0]['loss']:.4f} -> {last['loss']:.4f} nats per learned token{_measured(last)}")
    print(f"the model, for model.path of a run: {plan.folder / MODEL}")
    return 0


def _measured(line: dict[str, float]) -> str:
    said = {"heldout_loss": "held out", "heldout_score": "task score"}
    return "".join(f"; {words} {line[name]:.4f}" for name, words in said.items() if name in line)
