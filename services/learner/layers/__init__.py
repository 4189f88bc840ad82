"""How the layers of the learner's model compute: each distinct position once, norms in few passes."""
