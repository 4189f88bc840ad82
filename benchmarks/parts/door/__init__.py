"""What `benchmarks/door.py` is made of: clients' environments, a served home, and what is measured on it."""
