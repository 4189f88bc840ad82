"""The front door: clients of Tinker's wire sample from and train client-driven runs."""
