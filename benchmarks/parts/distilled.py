"""Distilled: a student that a teacher's log-probabilities alone have taught, beside that teacher.

The teacher is the export of a run that learned from rewards. The student begins where that run began, takes
as many rows in each of a quarter of the steps, and is given no reward.
"""

from collections.abc import Sequence

from antiphon.benchmarks.parts.measure import PROJECT, antiphon, run_job, scratch_home

CONFIG = PROJECT / "examples" / "quickstart.yaml"
FEWER = 4
"""The teacher has this many times the student's steps."""
RUN_S = 1800.0
"""Longest run."""
SCORED = ("evaluation.interval=0", "evaluation.samples=4", "record.mlflow=false")
"""Held-out prompts are answered before and after, four times: one answer of each is 0.02 off by chance."""
TAUGHT = (
    "reference.distillation=1.0",
    "reference.keep_reward=false",
    "loop.filter=none",
    "loop.max_staleness=0",
    "loop.prompts_per_step=128",
    "loop.group_size=2",
    "learner.warmup_steps=1",
    "learner.learning_rate=8e-4",
    "learner.gradient_clip=0.03",
)
"""Of the student. It compares no answers of a prompt, so a step's 256 rows come from as many prompts as
they can. Adam divides by the size of the gradient, so the weight alone decides nothing. By trial, shares of
a teacher of 60 steps (standard error 0.01 to 0.02): 32 prompts with 5 steps of warm-up 0.93; 128 prompts
0.94 to 0.95; with the gradient clipped at 0.1 twice 0.96, at 0.03 0.97; a rate of 1.1e-3 0.95; more
momentum 0.92; two updates a step 0.94; S=2, where such a step is too large for what is two versions old,
below 0.5."""


def distil(steps: int, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Train teacher and student; return the held-out scores, and the student's over the teacher's.

    Args:
        steps: of the teacher.
        overrides: key=value pairs for both.
    """
    with scratch_home() as home:
        words = [*SCORED, *overrides]
        job = run_job(home, CONFIG, [f"run.steps={steps}", *words], "teacher", RUN_S, untaught=True)
        teacher = home / "teacher"
        antiphon(home, "export", str(job.timings()["run_id"]), f"v{steps}", str(teacher))
        words += [f"run.steps={max(1, steps // FEWER)}", f"reference.model={teacher}", *TAUGHT]
        taught = run_job(home, CONFIG, [*words, "run.name=student"], "student", RUN_S)
        base, scores = job.metrics()["pass_before"], [one.metrics()["pass_after"] for one in (job, taught)]
    return {
        "distillation_base": base,
        "distillation_teacher": scores[0],
        "distillation_student": scores[1],
        "distillation_share": scores[1] / scores[0] if scores[0] else 0.0,
        "distillation_teacher_s": job.seconds,
        "distillation_student_s": taught.seconds,
    }
