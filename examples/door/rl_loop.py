"""Reinforcement loop: chain sums, as the demo has them, with rewards and steps of the client's own.

    python rl_loop.py examples/models/chain-sum --steps 40

Each step samples a group of answers to each of some problems from the newest weights, rewards those that
are right, and takes a step of importance-weighted policy gradient. Every sample has a seed, so that the same
command gives the same tokens and the same weights. `--load` goes on from what `--save` left.
"""

import argparse
import json
import re
from typing import Any

import numpy as np
import tinker
from tinker import types
from transformers import AutoTokenizer

OPENING = "State the final answer to the following arithmetic problem:"
ANSWER = re.compile(r"<answer>(-?\d{1,9})</answer>\s*$")


def problem(random: np.random.Generator) -> tuple[str, int]:
    """Return the sum of 3 to 12 digits with signs as a prompt, and its value."""
    terms = random.integers(0, 10, random.integers(3, 13))
    signs = [1, *random.choice([-1, 1], len(terms) - 1)]
    words = [f"{'+' if sign > 0 else '-'} {term}" for sign, term in zip(signs, terms, strict=True)]
    return f"{OPENING} {' '.join(words)[2:]} =", int(np.dot(signs, terms))


def datum(prompt: list[int], answer: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """Return a row in which only what was sampled has an advantage."""
    unseen = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": np.array([*prompt[1:], *answer], dtype=np.int64),
        "logprobs": np.array([*unseen, *logprobs], dtype=np.float32),
        "advantages": np.array([*unseen, *[advantage] * len(answer)], dtype=np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *answer[:-1]]),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


def step(training: Any, tokenizer: Any, given: argparse.Namespace, number: int) -> dict[str, float]:
    """Sample, reward and train once; return what came of it."""
    random = np.random.default_rng([given.seed, number])
    problems = [problem(random) for _ in range(given.prompts)]
    sampling = training.save_weights_and_get_sampling_client().result()
    asked = []
    for place, (text, _) in enumerate(problems):
        parameters = types.SamplingParams(
            max_tokens=given.max_tokens,
            temperature=1.0,
            seed=(given.seed * 10_000 + number) * 1_000 + place,
        )
        prompt = types.ModelInput.from_ints(tokenizer.encode(text))
        asked.append(sampling.sample(prompt, given.group, parameters))
    data, rewards, sampled = [], [], []
    for (text, value), future in zip(problems, asked, strict=True):
        answers = future.result().sequences
        texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in answers]
        found = [ANSWER.search(one) for one in texts]
        group = np.array([float(one is not None and int(one[1]) == value) for one in found])
        rewards.append(group.mean())
        if group.std() > 0.0:
            for one, advantage in zip(answers, (group - group.mean()) / group.std(), strict=True):
                data.append(datum(tokenizer.encode(text), one.tokens, one.logprobs, float(advantage)))
                sampled.append(one.logprobs)
    metrics = {"step": number, "reward": float(np.mean(rewards)), "rows": len(data)}
    if data:
        trained = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(
            types.AdamParams(learning_rate=given.learning_rate, beta1=0.5, eps=1e-8)
        )
        learner = [one["logprobs"].to_numpy() for one in trained.result().loss_fn_outputs]
        apart = [np.array(q) - p[-len(q) :] for p, q in zip(learner, sampled, strict=True)]
        metrics["kl_sample_train"] = float(np.concatenate(apart).mean())  # E_q[log q - log p], in nats
        stepped.result()
    return metrics


def main() -> None:
    """Run the loop; a line of JSON for each step, and one for what was saved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="with the tokenizer")
    parser.add_argument("--model", default="Qwen/Qwen3-8B-Base", help="by which the door knows the model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first step")
    parser.add_argument("--prompts", type=int, default=32, help="problems of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to each problem")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", help="tinker://.. of a checkpoint to go on from")
    parser.add_argument("--save", help="name under which the last weights are kept")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    service, ended = tinker.ServiceClient(), "interrupted"
    try:
        if given.load:
            training = service.create_training_client_from_state_with_optimizer(given.load).result()
        else:
            training = service.create_lora_training_client(base_model=given.model).result()
        for number in range(given.first, given.first + given.steps):
            print(json.dumps(step(training, tokenizer, given, number)), flush=True)
        if given.save:
            print(json.dumps({"saved": training.save_state(given.save).result().path}), flush=True)
        ended = "success"
    finally:  # also after Ctrl-C: the next client need not wait until this one counts as gone
        service.close(ended).result()


if __name__ == "__main__":
    main()
