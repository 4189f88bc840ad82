"""Speed on CPUs only: what the learner's layers and vLLM gain there, and the compiler that it needs."""
