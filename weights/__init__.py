"""Weights on their way: a version as a manifest and chunks by digest, patches, relays, transports."""
