"""What a run's numbers mean to a person: alarms, regressions, live view, replay verdicts."""
