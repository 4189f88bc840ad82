"""Pure decisions: no clock, no network, no randomness that was not handed in."""
