"""The HTML report of a run, its plots, and the page of benchmarks."""
