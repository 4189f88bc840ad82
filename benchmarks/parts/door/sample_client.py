"""Sample client: asks for many completions at once, and says how long they took together.

Runs in the environment of a client, which has nothing of this project.
"""

import argparse
import json
import os
import time
import urllib.request
from pathlib import Path

import tinker
from tinker import types


def stats() -> dict[str, float]:
    """Return the CPU seconds that the door has spent, and on how many calls."""
    headers = {"X-API-Key": os.environ["TINKER_API_KEY"]}
    url = os.environ["TINKER_BASE_URL"] + "/antiphon/stats"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as reply:
        said = json.load(reply)
    return {"cpu_s": said["cpu_s"], "calls": sum(said["calls"].values())}


def main() -> None:
    """Sample the prompts of a file, all at the same time; print seconds and tokens of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, help="JSON lines, each the token ids of a prompt")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    prompts = [json.loads(line) for line in given.prompts.read_text().splitlines()]
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model="Qwen/Qwen3-8B-Base").result()
    sampling = training.save_weights_and_get_sampling_client().result()
    for number in range(given.rounds):
        begun, asked = time.perf_counter(), []
        for place, prompt in enumerate(prompts):
            parameters = types.SamplingParams(
                max_tokens=given.max_tokens, temperature=1.0, seed=number * len(prompts) + place
            )
            asked.append(sampling.sample(types.ModelInput.from_ints(prompt), 1, parameters))
        tokens = sum(len(one.result().sequences[0].tokens) for one in asked)
        line = {"seconds": time.perf_counter() - begun, "tokens": tokens}
        print(json.dumps(line | stats()), flush=True)
    service.close("success").result()


if __name__ == "__main__":
    main()
