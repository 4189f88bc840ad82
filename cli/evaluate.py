"""evaluate: the held-out score of a run's policy versions; a running one measures on request."""

from pathlib import Path


def evaluate(
    run: str | None = None,
    /,
    *,
    version: int | None = None,
    results: Path | None = None,
    timeout_s: float = 600.0,
) -> int:
    """Print held-out scores; one that a running run has not measured yet is measured by its workers.

    Args:
        run: the run's id; by default the newest.
        version: the policy version; by default every one that was evaluated.
        results: JSON file to write the scores to.
        timeout_s: longest wait for an evaluation, seconds.
    """
    from antiphon.core.reporting.figures import interval
    from antiphon.runs.directory import home_directory
    from antiphon.runs.scores import held_out_scores, write_scores

    run_id, scores = held_out_scores(home_directory(), run, version, timeout_s)
    if results is not None:
        write_scores(run_id, scores, results)
    for score in scores:
        print(
            f"version {score.version}: held-out pass@1 {score.reward_mean:.4f} "
            f"± {interval(score.reward_mean, score.prompts):.4f} (95%) over {score.prompts} prompts"
        )
    if not scores:
        print("nothing was evaluated yet")
    return 0
