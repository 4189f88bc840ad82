"""Transports for where gRPC does not do: an object store, and a Lattica network."""
