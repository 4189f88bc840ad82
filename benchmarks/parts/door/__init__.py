"""What `benchmarks/door.py` is made of: environments of clients, a served home, and what is measured on it."""
