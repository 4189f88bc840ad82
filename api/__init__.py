"""Data classes and protocols that several sides name: coordinator, learner, engine, snapshots."""
