"""What the sandbox of the scorers is tried with."""
