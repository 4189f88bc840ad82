"""Audits: groups scored again under the version that sampled them."""
