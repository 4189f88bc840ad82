"""The HTML report of a run, its plots, and the comparison of runs."""
