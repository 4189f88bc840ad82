"""Supervised loop: teaches a model the completions of a file with the loss cross_entropy, in the plain SDK.

    python sft_loop.py FOLDER examples/sft/train.jsonl --steps 20

FOLDER has the tokenizer; the file has JSON lines with `prompt` and `completion`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types
from transformers import AutoTokenizer


def datum(tokenizer: Any, prompt: str, completion: str) -> types.Datum:
    """Return a row whose completion and end token are learned, its prompt is not."""
    before = tokenizer.encode(prompt)
    after = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = [*before, *after]
    weights = np.array([0.0] * (len(before) - 1) + [1.0] * len(after), dtype=np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "weights": types.TensorData.from_numpy(weights),
        },
    )


def main() -> None:
    """Train and print the loss of each step, in nats per learned token."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="Qwen/Qwen3-8B-Base", help="by which the door knows the model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=32, help="of a step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    rows = [json.loads(line) for line in given.file.read_text().splitlines()]
    data = [datum(tokenizer, row["prompt"], row["completion"]) for row in rows]
    learned = [float(np.sum(one.loss_fn_inputs["weights"].to_numpy())) for one in data]
    service, ended = tinker.ServiceClient(), "interrupted"
    try:
        training = service.create_lora_training_client(base_model=given.model).result()
        adam = types.AdamParams(learning_rate=given.learning_rate, grad_clip_norm=1.0)
        for step in range(given.steps):
            places = [(step * given.rows + row) % len(data) for row in range(given.rows)]
            done = training.forward_backward([data[place] for place in places], "cross_entropy")
            stepped = training.optim_step(adam)
            loss = done.result().metrics["loss:sum"] / sum(learned[place] for place in places)
            stepped.result()
            print(json.dumps({"step": step, "loss": round(loss, 4)}), flush=True)
        ended = "success"
    finally:  # also after Ctrl-C: the next client need not wait until this one counts as gone
        service.close(ended).result()


if __name__ == "__main__":
    main()
