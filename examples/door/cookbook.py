"""Cookbook: starts a recipe of tinker-cookbook as it is, on this machine's tokenizer and problems.

    python cookbook.py FOLDER NAME RECIPE [--gsm8k FILE] key=value ...

FOLDER has the tokenizer, NAME is the listed model that the recipe believes to train (`door.base_models` must
have it), RECIPE a module of tinker_cookbook.recipes such as `math_rl.train` or `rl_loop`. FILE takes the
place of GSM8K: JSON lines with `question` and `answer`, whose last line is `#### NUMBER`.
"""

import argparse
import json
import runpy
import sys
from pathlib import Path

import datasets
from tinker_cookbook.tokenizer_utils import register_tokenizer
from transformers import AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder")
parser.add_argument("name")
parser.add_argument("recipe")
parser.add_argument("--gsm8k", type=Path)
given, words = parser.parse_known_args()
register_tokenizer(given.name, lambda: AutoTokenizer.from_pretrained(given.folder))
if given.gsm8k:
    problems = datasets.Dataset.from_list([json.loads(line) for line in given.gsm8k.read_text().splitlines()])
    datasets.load_dataset = lambda *_, **__: datasets.DatasetDict({"train": problems, "test": problems})
sys.argv = [given.recipe, f"model_name={given.name}", *words]
runpy.run_module(f"tinker_cookbook.recipes.{given.recipe}", run_name="__main__")
