"""Learner: trains on stored batches and publishes policy versions."""
