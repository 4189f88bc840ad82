"""Parts of the drafting benchmarks: models, loads and engines to compare."""
