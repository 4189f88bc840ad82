"""Injected: the folder that a sampled job has in its PYTHONPATH."""
