"""What must hold in a simulated run, and who watches it."""
