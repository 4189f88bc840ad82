"""Scorer: a model that never changes says how probable the policy's tokens are."""
