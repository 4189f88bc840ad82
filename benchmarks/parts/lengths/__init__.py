"""Parts of the benchmark of orders of leasing by length."""
