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
SCORED = ("evaluation.interval=0", "evaluation.samples=2", "record.mlflow=false")
"""Held-out prompts are answered before and after, each twice: one answer of each is 0.02 off by chance."""
TAUGHT = (
    "reference.distillation=1.0",
    "reference.keep_reward=false",
    "loop.filter=none",
    "loop.max_staleness=0",
    "learner.learning_rate=5e-4",
)
"""Of the student. Adam divides by the size of the gradient, so the weight alone decides nothing. By trial
with a teacher of 60 steps (0.887; 512 answers, standard error 0.017): rates of 3e-4, 5e-4 and 1e-3 end at
0.79, 0.83 and 0.79; with S=2, where a step of such a rate is too large for what is two versions old, 5e-4 at
0.41. Several updates a step, more momentum, other clips of the gradient, cosine, and a KL in the loss besides
end at 0.77 to 0.82; a student of 25 steps at 0.83 of a teacher's 0.89. A KL of 0.007 nats a token is left."""


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
