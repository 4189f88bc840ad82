"""Lineage: manifests, the artifact store, tables, tracking and pins."""
