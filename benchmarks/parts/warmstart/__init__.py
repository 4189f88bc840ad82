"""Warm start: the demo's base model, made from nothing."""
