"""Reward: judges finished trajectories with the environment."""
