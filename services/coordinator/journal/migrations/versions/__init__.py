"""Versions: one migration a file, oldest first; a file that was released is never changed."""
