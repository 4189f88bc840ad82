"""Arithmetic: a tiny model that can answer what the cookbook's recipes ask.

`math_rl env=arithmetic` asks for sums of two numbers up to 100, after one example, in at most 5 tokens;
`rl_loop` wants a number in a box. The demo's model spells neither. So the model of the examples with turns is
made again for these two tasks, with its tokenizer (every ASCII character is a token): a first stage teaches
right answers, a second one makes wrong ones the usual ones, so that reinforcement has something to find.
"""

import json
from pathlib import Path

import numpy as np

from antiphon.benchmarks.parts.door.arithmetic_task import EXAMPLE, LARGEST
from antiphon.benchmarks.parts.warmstart.chat_tokenizer import build_chat_tokenizer
from antiphon.benchmarks.parts.warmstart.tiny_model import ModelShape
from antiphon.benchmarks.parts.warmstart.turns import (
    Demonstration,
    Stage,
    TurnsRecipe,
    show_progress,
    warmstart_turns,
)
from antiphon.core.messages import Message

MOST_TOKENS = 5
"""Of an answer; the recipe's default."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
BOXED_EXAMPLE = (
    "How many r's are in strawberry?" + SUFFIX,
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
    "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
)
"""Comes before each question of `tinker_cookbook.recipes.rl_loop`, which all end with `SUFFIX`."""
WORDS = (*BOXED_EXAMPLE, SUFFIX, "\\boxed{")
"""Further tokens, so that these prompts are short."""
HASTY_BY = 9
"""Most by which an answer in haste is off."""
STAGES = (
    Stage(steps=400, learning_rate=6e-3, careful=1.0, hasty=0.0),
    Stage(steps=40, learning_rate=1e-3, careful=0.15, hasty=0.85, warmup_steps=10),
)


def make_model(out: Path) -> Path:
    """Make the model, which takes a few minutes, and return its folder; one that is there is kept."""
    if not (out / "warmstart.json").is_file():
        shape = ModelShape(vocabulary=len(build_chat_tokenizer(more_words=WORDS)))
        recipe = TurnsRecipe(stages=STAGES, shape=shape, batch=128)
        warmstart_turns(recipe, out, show_progress, (_adding, _boxing), WORDS)
    return out


def write_problems(path: Path, count: int, seed: int = 0) -> Path:
    """Write sums in the form of GSM8K, one JSON line each, and return the file."""
    random = np.random.default_rng(seed)
    lines = []
    for a, b in random.integers(0, LARGEST, (count, 2), endpoint=True).tolist():
        row = {"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return path


def _adding(care: str, random: np.random.Generator) -> Demonstration:
    question, answer = _sum(care, random)
    return Demonstration(EXAMPLE[0], (), ((EXAMPLE[1], Message("user", question)), (answer, None)))


def _boxing(care: str, random: np.random.Generator) -> Demonstration:
    question, answer = _sum(care, random)
    asked = Message("user", question + SUFFIX)
    return Demonstration(BOXED_EXAMPLE[0], (), ((BOXED_EXAMPLE[1], asked), (f"\\boxed{{{answer}}}", None)))


def _sum(care: str, random: np.random.Generator) -> tuple[str, str]:
    """Return a question, and its answer with more or less care."""
    a, b = map(int, random.integers(0, LARGEST, 2, endpoint=True))
    by = 0 if care == "careful" else int(random.integers(-HASTY_BY, HASTY_BY, endpoint=True))
    return f"What is {a} + {b}?", str(max(0, a + b + by))
