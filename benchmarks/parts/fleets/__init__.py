"""Engines that start workers, each real on this machine, for benchmarks and tests."""
