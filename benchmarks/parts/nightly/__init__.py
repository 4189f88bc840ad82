"""The scheduled benchmark: a grid of runs and scripts, a table for each commit, and what got worse."""
