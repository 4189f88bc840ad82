"""What a worker's engine shows before it serves."""
