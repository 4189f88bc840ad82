"""Parts of the benchmark of the front door."""
