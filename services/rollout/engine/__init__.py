"""The rollout engine: vLLM behind one protocol, in a thread of its own."""
