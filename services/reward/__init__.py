"""Reward: rewards finished trajectories with the environment."""
