"""Fleets: parts of benchmarks/fleets.py."""
