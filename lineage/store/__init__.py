"""The artifact store: immutable bytes by digest, on disk and in a remote."""
