"""Learning: what a choice of the recipe costs in reward, with production's trainer and a set staleness."""
