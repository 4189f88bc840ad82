"""What the learner's step is measured on, and against."""
