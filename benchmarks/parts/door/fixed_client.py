"""Fixed client: takes steps on the same made-up rows, given in one call or in several at once.

Runs in the environment of a client, which has nothing of this project.
"""

import argparse
import json
from itertools import pairwise

import numpy as np
import tinker
from tinker import types

VOCABULARY = 64
"""Of the demo's model."""


def rows(random: np.random.Generator, count: int) -> list[types.Datum]:
    """Return rows of 8 to 40 tokens with log-probabilities and advantages."""
    made = []
    for _ in range(count):
        tokens = random.integers(4, VOCABULARY - 24, random.integers(8, 41))
        length = len(tokens) - 1
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "logprobs": -random.random(length).astype(np.float32),
            "advantages": random.standard_normal(length).astype(np.float32),
        }
        made.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
                loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
            )
        )
    return made


def main() -> None:
    """Train; print the sum of the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1, help="of each step")
    parser.add_argument("--rows", type=int, default=70, help="of each step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first step")
    parser.add_argument("--load", help="tinker://.. of a checkpoint to go on from")
    parser.add_argument("--save", help="name under which the last weights are kept")
    given = parser.parse_args()
    service = tinker.ServiceClient()
    if given.load:
        training = service.create_training_client_from_state_with_optimizer(given.load).result()
    else:
        training = service.create_lora_training_client(base_model="Qwen/Qwen3-8B-Base").result()
    for step in range(given.first, given.first + given.steps):
        data = rows(np.random.default_rng(step), given.rows)
        cuts = [round(part * given.rows / given.calls) for part in range(given.calls + 1)]
        parts = [data[start:stop] for start, stop in pairwise(cuts)]
        asked = [training.forward_backward(part, "importance_sampling") for part in parts]
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
        loss = sum(one.result().metrics["loss:sum"] for one in asked)
        stepped.result()
        print(json.dumps({"loss": loss}), flush=True)
    if given.save:
        print(json.dumps({"saved": training.save_state(given.save).result().path}), flush=True)
    service.close("success").result()


if __name__ == "__main__":
    main()
