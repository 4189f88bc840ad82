"""Broadcast: published weights as a manifest and chunks by digest."""
