"""What the operating system gives: ports, processes, fail-points, wake-ups."""
