"""Parity parts: one run of TRL's GRPOTrainer with the recipe of a configuration; runs in TRL's environment.

    PYTHON -m antiphon.benchmarks.parts.parity.trl_run CONFIG FOLDER THREADS [key=value ...]

The prompts come in the order in which the loop opens them, and rewards from the same environment.
The weights of every evaluated version are written to FOLDER as safetensors; the time that takes does not
count. The last line is a JSON object with the seconds and CPU seconds after each step, how long everything
took until the first step began, and completion tokens per second of generation and of what is neither
generation nor reward.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

BEGUN_S = time.perf_counter()


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Train and print what happened."""
    config_path, folder, overrides = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:]
    import torch

    torch.set_num_threads(int(sys.argv[3]))
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from antiphon.core.config import load_config
    from antiphon.core.learning_rate import warmup_steps
    from antiphon.core.loop.admission import prompt_place
    from antiphon.environments.registry import make_environment
    from antiphon.models.codec import resolve_model_path
    from antiphon.services.learner.policy import published_names

    config = load_config(config_path, overrides)
    loop, learner, algorithm, section = config.loop, config.learner, config.algorithm, config.environment
    environment = make_environment(
        section.name,
        section.parameters,
        section.seed,
        train_size=section.train_size,
        heldout_size=section.heldout_size,
    )
    steps = config.run.steps
    places = [prompt_place(config, number)[0] for number in range(steps * loop.prompts_per_step)]
    problems = [environment.problem("train", index) for index in places]
    path = resolve_model_path(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def reward(completions: list[str], key: list[str], **_: Any) -> list[float]:
        return [
            environment.reward(environment.problem_by_key(one), [text])[0]
            for one, text in zip(key, completions, strict=True)
        ]

    schedules = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    arguments = GRPOConfig(
        output_dir=str(folder / "output"),
        max_steps=steps,
        per_device_train_batch_size=loop.prompts_per_step * loop.group_size,
        num_generations=loop.group_size,
        gradient_accumulation_steps=1,
        max_completion_length=config.sampling.max_tokens,
        temperature=config.sampling.temperature,
        learning_rate=learner.learning_rate,
        lr_scheduler_type=schedules[learner.schedule],
        warmup_steps=warmup_steps(learner, steps),
        adam_beta1=learner.beta1,
        adam_beta2=learner.beta2,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.gradient_clip,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group" if algorithm.normalise_advantages else "none",
        shuffle_dataset=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=config.run.seed,
    )
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    start_s: list[float] = []
    # What does not count: seconds and CPU seconds at which counting began, moved on by each break.
    origin = [0.0, 0.0]

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Takes the time of each step, and keeps the weights of evaluated versions."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            origin[:] = [time.perf_counter(), cpu_s()]
            start_s.append(origin[0] - BEGUN_S)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds.append(time.perf_counter() - origin[0])
            cpu_seconds.append(cpu_s() - origin[1])
            version, interval = int(state.global_step), config.evaluation.interval
            if version == steps or (interval and version % interval == 0):
                begun, begun_cpu = time.perf_counter(), cpu_s()
                weights = model.state_dict()
                kept = {name: weights[name].detach().cpu() for name in published_names(model)}
                save_file(kept, str(folder / f"v{version:06d}.safetensors"))
                origin[0] += time.perf_counter() - begun
                origin[1] += cpu_s() - begun_cpu

    # Of generation, and of generation with rewards.
    sampling_s = [0.0, 0.0]

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Takes the time of generation."""

        def _generate(self, *words: Any, **named: Any) -> Any:
            return timed(0, super()._generate, *words, **named)

        def _generate_and_score_completions(self, *words: Any, **named: Any) -> Any:
            return timed(1, super()._generate_and_score_completions, *words, **named)

    def timed(place: int, call: Any, *words: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        found = call(*words, **named)
        sampling_s[place] += time.perf_counter() - begun
        return found

    trainer = Timed(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": one.text, "key": one.key} for one in problems]),
        callbacks=[Watch()],
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    tokens = sum(entry["completions/mean_length"] for entry in log) * loop.prompts_per_step * loop.group_size
    found = {
        "start_s": start_s[0],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "generation_tokens_per_s": tokens / sampling_s[0],
        "training_tokens_per_s": tokens / (seconds[-1] - sampling_s[1]),
    }
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait must not take the cores of those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
