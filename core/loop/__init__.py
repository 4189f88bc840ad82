"""The rules of the overlapping loop: what is leased, accepted, kept and trained, from state alone."""
