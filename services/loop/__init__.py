"""Loop: what the stages of a run ask of its services."""
