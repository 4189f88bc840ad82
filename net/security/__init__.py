"""Keys, certificates, tokens, and the guard in front of every call."""
