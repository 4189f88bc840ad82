"""MLflow: what a run tells it, and how it survives MLflow being away."""
