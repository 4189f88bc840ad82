"""Recipes: the cookbook's own programs against the door, unchanged, and the same samples with a loop of ours.

Each program has a door of its own. `math_rl` trains the model of `arithmetic`; what it reaches is compared
with `antiphon run` on the same task, with as many samples and the same rate. Besides: `rl_loop`, and a
supervised loop on a local file.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from antiphon.benchmarks.parts.door.arithmetic import MOST_TOKENS, write_problems
from antiphon.benchmarks.parts.door.environments import COOKBOOKS, EXAMPLES, client_python
from antiphon.benchmarks.parts.door.served import NAMES, Door, run_client, served
from antiphon.benchmarks.parts.measure import PROJECT, journal_events, run_job, scratch_home

QUICKSTART = PROJECT / "examples" / "quickstart.yaml"
RATE = 1e-4
RUN_S = 1800.0
PROMPTS, GROUP = 32, 8
LOSS = "loss_fn=importance_sampling"
"""For stable_reinforce, the default of 0.6.1, has no published definition."""
ENDS_SHARE = 0.2
"""Of the steps; the means of so many first and last ones are begin and end of a curve."""


class Recipes:
    """Counts what ran, and keeps what it measured."""

    def __init__(self, model: Path, steps: int, prompts: int = PROMPTS) -> None:
        """Train `model` for `steps` steps with `prompts` groups of `GROUP` samples each."""
        self._model, self._steps, self._prompts = model, steps, prompts
        self.ok: list[str] = []
        self.failed: list[str] = []
        self.unserved = Counter[str]()
        self.polls = self.futures = 0
        self.curves: dict[str, list[float]] = {}
        """Reward of each step of `math_rl`, by cookbook."""
        self.apart: list[float] = []
        """Mean of log q - log p over the tokens of each step, sampled against trained, in nats."""

    def run(self) -> None:
        """Run all programs; one that fails is noted, with its last words on the screen."""
        for cookbook in COOKBOOKS:
            python = client_python(cookbook)
            with self._program(f"math_rl {cookbook}") as door:
                self._math_rl(door, python, cookbook)
            with self._program(f"rl_loop {cookbook}") as door:
                self._rl_loop(door, python, cookbook)
        python = client_python(COOKBOOKS[0])
        with self._program("cross_entropy") as door:
            losses = self._supervised(door, python)
            _check(
                losses[-1] < losses[0],
                f"the loss of the supervised loop went from {losses[0]} to {losses[-1]}",
            )

    @contextmanager
    def _program(self, name: str) -> Iterator[Door]:
        try:
            with served(f"model.path={self._model}", "rollout.max_model_tokens=512") as door:
                yield door
                stats = door.stats()
        except SystemExit as error:
            print(f"{name} failed: {error}", flush=True)
            self.failed.append(name)
            return
        self.ok.append(name)
        self.unserved.update(stats.unserved)
        self.polls += stats.polls
        self.futures += stats.futures
        print(f"{name}: {stats}", flush=True)

    def _math_rl(self, door: Door, python: Path, cookbook: str) -> None:
        folder = door.home / "math_rl"
        words = [
            *(str(self._model), NAMES[1], "math_rl.train", "env=arithmetic", "renderer_name=qwen3_instruct"),
            *(LOSS, f"learning_rate={RATE}", f"groups_per_batch={self._prompts}", f"group_size={GROUP}"),
            *(f"max_tokens={MOST_TOKENS}", f"max_steps={self._steps}", "eval_every=0", "save_every=5"),
            *(f"log_path={folder}", "behavior_if_log_dir_exists=delete"),
        ]
        run_client(python, EXAMPLES / "cookbook.py", words, door)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.curves[cookbook] = [row["env/all/correct"] for row in rows if "env/all/correct" in row]
        self.apart += [row[name] for row in rows if (name := "optim/kl_sample_train_v1") in row]
        _check(len(self.curves[cookbook]) >= min(self._steps, 2), "math_rl left no curve")

    def _rl_loop(self, door: Door, python: Path, cookbook: str) -> None:
        folder, steps = door.home / "rl_loop", min(self._steps, 4)
        problems = write_problems(door.home / "problems.jsonl", steps * 8)
        words = [
            *(str(self._model), NAMES[1], "rl_loop", "--gsm8k", str(problems)),
            *(["batch_size=8", f"group_size={GROUP}", "max_tokens=16", f"max_steps={steps}", "save_every=2"]),
            *([LOSS] if cookbook != "0.5.8" else []),  # that one has no other
            f"log_path={folder}",
        ]
        run_client(python, EXAMPLES / "cookbook.py", words, door)
        _check(len(door.weights()) > 0, "rl_loop trained no step: all rewards of each group were equal")

    def _supervised(self, door: Door, python: Path) -> list[float]:
        rows = [json.loads(line) for line in write_problems(door.home / "p", 256).read_text().splitlines()]
        path = door.home / "sums.jsonl"
        pairs = [{"prompt": row["question"], "completion": row["answer"].split("#### ")[1]} for row in rows]
        path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        words = [str(self._model), str(path), "--steps", str(max(4, self._steps // 4))]
        return [row["loss"] for row in run_client(python, EXAMPLES / "sft_loop.py", words, door)]

    def figures(self) -> dict[str, Any]:
        """Return what was measured."""
        found: dict[str, Any] = {
            "recipes_ok": len(self.ok),
            "recipes": len(self.ok) + len(self.failed),
            "unserved": sum(self.unserved.values()),
            "unserved_calls": dict(self.unserved),
            "polls_per_future_recipes": round(self.polls / max(1, self.futures), 3),
        }
        if self.apart:
            found["kl_sample_train"] = max(map(abs, self.apart))
        return found


def own_loop(model: Path, steps: int, prompts: int = PROMPTS) -> list[float]:
    """Run a loop of ours on the same task with as many samples, and return the reward of each step."""
    words = [
        f"model.path={model}",
        f"run.steps={steps}",
        "environment.name=antiphon.benchmarks.parts.door.arithmetic_task:Arithmetic",
        "environment.parameters={}",
        "environment.max_turns=1",
        "model.renderer=qwen3",
        "model.template_arguments={thinking_retention: all}",
        "environment.train_size=4096",
        "environment.heldout_size=32",
        "loop.filter=none",
        f"loop.prompts_per_step={prompts}",
        f"loop.group_size={GROUP}",
        f"sampling.max_tokens={MOST_TOKENS}",
        f"learner.learning_rate={RATE}",
        "learner.schedule=constant",
        "learner.warmup_steps=0",
        "learner.beta1=0.9",
        "learner.beta2=0.95",
        "evaluation.interval=0",
        "evaluation.prompts=32",
        "record.dvc=false",
        "record.mlflow=false",
    ]
    with scratch_home() as home:
        run_job(home, QUICKSTART, words, "own", RUN_S, untaught=True)
        (journal,) = home.glob("runs/*/journal.db")
        sealed = [body for kind, body in journal_events(journal) if kind == "batch.sealed"]
        return [float(body["reward_mean"]) for body in sealed]


def ends(curve: list[float]) -> tuple[float, float]:
    """Return the mean reward of the first and of the last steps of a curve."""
    count = max(1, round(len(curve) * ENDS_SHARE))
    return mean(curve[:count]), mean(curve[-count:])


def compare(curves: dict[str, list[float]], own: list[float]) -> dict[str, Any]:
    """Return where the curves begin and end, and the least share of what the loop of ours reached."""
    reached = {name: ends(curve) for name, curve in curves.items()}
    return {
        "arithmetic_share": round(min(last for _, last in reached.values()) / ends(own)[1], 4),
        "arithmetic": {
            name: {"begin": round(begin, 4), "end": round(end, 4)}
            for name, (begin, end) in {**reached, "own": ends(own)}.items()
        },
    }


def _check(held: bool, sentence: str) -> None:
    if not held:
        raise SystemExit(sentence)
