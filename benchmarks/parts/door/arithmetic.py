"""Arithmetic: a tiny model that can answer the cookbook's recipes, and their task for a run of ours.

`math_rl env=arithmetic` asks for sums of two numbers up to 100, after one example, in at most 5 tokens;
`rl_loop` wants a number in a box. The demo's model spells neither. So the model of the examples with turns is
made again for these two tasks, with its tokenizer (every ASCII character is a token): a first stage teaches
right answers, a second one makes wrong ones the usual ones, so that reinforcement has something to find.
"""

import json
import re
from pathlib import Path
from typing import ClassVar

import numpy as np

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
from antiphon.environments.environment import Problem
from antiphon.environments.generated import GeneratedEnvironment

LARGEST = 100
"""Of both numbers, as in `tinker_cookbook.recipes.math_rl.arithmetic_env`."""
EXAMPLE = ("What is 4 + 5?", "9")
"""Comes before each question there."""
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
    Stage(steps=40, learning_rate=1e-3, careful=0.3, hasty=0.7, warmup_steps=10),
)
_INTEGER = re.compile(r"-?\d+")


def prompt_of(question: str) -> str:
    """Return the recipe's prompt as its renderer qwen3_instruct writes it, special tokens spelt out."""
    said = zip(("user", "assistant", "user"), (*EXAMPLE, question), strict=True)
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    return f"{turns}<|im_start|>assistant\n"


class Arithmetic(GeneratedEnvironment):
    """The arithmetic of the cookbook's recipe, with its prompt and its judgement."""

    only_compares: ClassVar[bool] = True
    name = "arithmetic"

    def draw(self, random: np.random.Generator) -> tuple[str, str]:
        """Draw two numbers."""
        a, b = map(int, random.integers(0, LARGEST, 2, endpoint=True))
        return prompt_of(f"What is {a} + {b}?"), str(a + b)

    def score(self, problem: Problem, completion: str) -> float:
        """Return 1 when the last number is the right one, else 0."""
        found = _INTEGER.findall(completion.replace(",", ""))
        return float(bool(found) and int(found[-1]) == int(problem.answer))


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
