"""MLflow: what a run logs there, and how it survives MLflow being away."""
