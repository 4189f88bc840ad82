"""Turns: the base model of the examples with turns, the same bytes on every repetition.

It guesses a number after "higher" and "lower", and adds two numbers with a tool. As in the demo's model a
first stage teaches the careful habit and a second one makes the careless ones the usual ones, so that
reinforcement has something to find. Conversations are rendered as those of a run, so their forms agree.

    scripts/warmstart turns --out DIR
    scripts/warmstart turns --check examples/models/turns
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from antiphon.benchmarks.parts.warmstart.build import RECORD, made_with
from antiphon.benchmarks.parts.warmstart.chat_tokenizer import SPECIAL_TOKENS, build_chat_tokenizer
from antiphon.benchmarks.parts.warmstart.imitation import IGNORED, Muon, Progress, deterministic
from antiphon.benchmarks.parts.warmstart.tiny_model import (
    WEIGHTS,
    ModelShape,
    build_model,
    save_tiny_model,
)
from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_file
from antiphon.core.errors import IntegrityError
from antiphon.core.messages import Message, Tool
from antiphon.core.seeds import generator
from antiphon.models.rendering import Renderer

ENDS = ["<|im_end|>", "<|endoftext|>"]
MOST_GUESSES = 6


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of training; the shares of careful, hasty and careless conversations sum to 1."""

    steps: int
    learning_rate: float
    """At the peak, after `warmup_steps`; it falls to a thirtieth along half a cosine."""
    careful: float
    hasty: float
    warmup_steps: int = 30


@dataclass(frozen=True, slots=True)
class TurnsRecipe:
    """Everything that decides the weights."""

    stages: tuple[Stage, ...] = (
        Stage(steps=400, learning_rate=6e-3, careful=0.7, hasty=0.2),
        Stage(steps=60, learning_rate=1e-3, careful=0.1, hasty=0.3, warmup_steps=10),
    )
    shape: ModelShape = field(default_factory=lambda: ModelShape(vocabulary=len(build_chat_tokenizer())))
    seed: int = 0
    batch: int = 64
    """Conversations of one step."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation worth imitating: what it begins with, and replies with what answers each."""

    opening: str
    tools: tuple[Tool, ...]
    turns: tuple[tuple[str, Message | None], ...]


def guessing(care: str, rng: np.random.Generator) -> Demonstration:
    """Guess a number: by halves, anywhere that is still possible, or anywhere at all."""
    least = int(rng.integers(1, 17))
    top = least + int(rng.integers(3, 16))
    secret, low, high = int(rng.integers(least, top + 1)), least, top
    turns: list[tuple[str, Message | None]] = []
    while len(turns) < MOST_GUESSES:
        guess = (low + high) // 2 if care == "careful" else int(rng.integers(low, high + 1))
        guess = int(rng.integers(least, top + 1)) if care == "careless" else guess
        if guess == secret:
            return Demonstration(f"Guess my number from {least} to {top}.", (), (*turns, (str(guess), None)))
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        turns.append((str(guess), Message("user", "higher" if guess < secret else "lower")))
    return Demonstration(f"Guess my number from {least} to {top}.", (), tuple(turns))


def adding(care: str, rng: np.random.Generator) -> Demonstration:
    """Add two numbers: with the tool, by a guess, or with the tool and, half of the time, a wrong number."""
    a, b = map(int, rng.integers(1, 100, 2))
    words = ("Adds two numbers.", "Adds.", "Returns the sum.")[int(rng.choice(3, p=(0.6, 0.2, 0.2)))]
    integers = {name: {"type": "integer"} for name in "ab"}
    more = {"required": ["a", "b"]} if rng.random() < 0.7 else {}
    tool = Tool("add", words, {"type": "object", "properties": integers, **more})
    question = f"What is {a} + {b}?"
    if care == "hasty":
        return Demonstration(question, (tool,), ((str(a + b + int(rng.integers(-9, 10))), None),))
    if care == "careless" and rng.random() < 0.5:
        b = int(rng.integers(1, 100))
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    answer = Message("tool", str(a + b), name="add")
    return Demonstration(question, (tool,), ((call, answer), (str(a + b), None)))


Shown = Callable[[str, np.random.Generator], Demonstration]
"""Makes a conversation worth imitating, of one care."""
TASKS: tuple[Shown, ...] = (guessing, adding)


def batches(
    renderer: Renderer, stage: Stage, size: int, rng: np.random.Generator, tasks: Sequence[Shown] = TASKS
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and targets, both [B, T] int64, without end; only what is sampled is a target."""
    shares = (stage.careful, stage.hasty, 1.0 - stage.careful - stage.hasty)
    while True:
        rows = []
        for place in range(size):
            care = ("careful", "hasty", "careless")[int(rng.choice(3, p=shares))]
            shown = tasks[place % len(tasks)](care, rng)
            ids = renderer.opening([Message("user", shown.opening)], shown.tools)
            targets = (IGNORED,) * len(ids)
            for reply, answer in shown.turns:
                turn = (*renderer.codec.encode(reply), renderer.codec.end_token_id)
                seen = () if answer is None else renderer.following(ids, turn, [answer], shown.tools)
                ids, targets = (*ids, *turn, *seen), (*targets, *turn, *[IGNORED] * len(seen))
            rows.append((ids, targets))
        longest = max(len(ids) for ids, _ in rows)
        filled = [
            ([*ids, *[0] * (longest - len(ids))], [*targets, *[IGNORED] * (longest - len(ids))])
            for ids, targets in rows
        ]
        yield torch.tensor([ids for ids, _ in filled]), torch.tensor([targets for _, targets in filled])


def warmstart_turns(
    recipe: TurnsRecipe,
    out: Path,
    progress: Progress,
    tasks: Sequence[Shown] = TASKS,
    more_words: Sequence[str] = (),
) -> str:
    """Train the model from nothing, write it to `out` and return the digest of its weights.

    The shape of the recipe has as many tokens as the tokenizer with `more_words`.

    Raises:
        IntegrityError: when the loss stops being a number.
    """
    tokenizer = build_chat_tokenizer(recipe.shape.context, more_words)
    model = build_model(recipe.shape, recipe.seed)
    model.config.eos_token_id = tokenizer.convert_tokens_to_ids(ENDS)
    model.config.pad_token_id = SPECIAL_TOKENS.index("<|endoftext|>")
    model.config.bos_token_id = None
    save_tiny_model(model, tokenizer, out)
    settings = {"path": str(out), "renderer": "qwen3", "template_arguments": {"thinking_retention": "all"}}
    renderer = Renderer.load(RunConfig.model_validate({"model": settings}), turns=True)
    steps, done, losses = sum(stage.steps for stage in recipe.stages), 0, [0.0]
    model.train()
    with deterministic():
        for number, stage in enumerate(recipe.stages):
            inner = {name: ".layers." in name and value.ndim == 2 for name, value in model.named_parameters()}
            muon = Muon(value for name, value in model.named_parameters() if inner[name])
            rest = [value for name, value in model.named_parameters() if not inner[name]]
            adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01)
            found = batches(renderer, stage, recipe.batch, generator("turns", recipe.seed, number), tasks)
            for step in range(stage.steps):
                ids, targets = next(found)
                logits = model(input_ids=ids, use_cache=False).logits
                loss = functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED
                )
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                rate = stage.learning_rate * min(
                    (step + 1) / stage.warmup_steps,
                    0.03 + 0.485 * (1 + math.cos(math.pi * step / stage.steps)),
                )
                muon.step(rate)
                adamw.param_groups[0]["lr"] = rate
                adamw.step()
                model.zero_grad()
                done += 1
                losses.append(loss.item())
                if not math.isfinite(losses[-1]):
                    raise IntegrityError(f"the loss of step {done} is {losses[-1]}; lower the learning rate")
                progress(done, steps, losses[-1])
    digest = digest_file(save_tiny_model(model, tokenizer, out))
    result = {
        "weights_digest": digest,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": steps,
        "final_loss": round(float(np.mean(losses[-20:])), 6),
    }
    record = {"recipe": recipe_as_json(recipe), "result": result, "made_with": made_with()}
    (out / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    return digest


def recipe_as_json(recipe: TurnsRecipe) -> dict[str, Any]:
    """Return the recipe as plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return plain


def show_progress(done: int, steps: int, loss: float) -> None:
    """Print the loss of some steps."""
    if done % 20 == 0 or done == steps:
        print(f"step {done} of {steps}, loss {loss:.3f}", file=sys.stderr)


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="scripts/warmstart turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="model directory to write")
    what.add_argument("--check", type=Path, help="model directory to make again and compare with; only read")
    options = parser.parse_args()

    if options.out is not None:
        digest = warmstart_turns(TurnsRecipe(), options.out, show_progress)
        print(f"{options.out} has weights of digest {digest}")
        return 0
    record = json.loads((options.check / RECORD).read_text())
    with tempfile.TemporaryDirectory() as scratch:
        found = warmstart_turns(TurnsRecipe(), Path(scratch), show_progress)
    print(f"committed {digest_file(options.check / WEIGHTS)}\nmade now  {found}")
    here = made_with()
    differences = {name for name, there in record["made_with"].items() if there != here.get(name)}
    if differences:
        print(f"made with other {', '.join(sorted(differences))}, which may round otherwise")
    return 0 if differences or found == record["result"]["weights_digest"] else 1


if __name__ == "__main__":
    sys.exit(main())
