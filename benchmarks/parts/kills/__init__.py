"""Parts of the kill benchmark: processes that are killed, and the audit of what they left."""
