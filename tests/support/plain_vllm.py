"""Plain vLLM in a process of its own, as anybody starts it: what it answers greedily from a model folder."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from antiphon.services.rollout.engine.environment import child_environment

_SCRIPT = """
import gc
gc.disable()  # a third of what loading vLLM takes
import json, sys
from vllm import LLM, SamplingParams

folder, prompts, tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
# vLLM's own choice for weights in float32 is a 16-bit type, in which two likely tokens may change places.
llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4, seed=0)
greedy = SamplingParams(temperature=0.0, max_tokens=tokens)
answers = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
print("ANSWERS " + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""


def answers(folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Return the greedy completion of each prompt, as token ids, end tokens included."""
    variables = child_environment(threads=1) | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(folder), json.dumps([list(p) for p in prompts]), str(tokens)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240.0,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    told: list[list[int]] = json.loads(found[-1].removeprefix("ANSWERS "))
    return told
