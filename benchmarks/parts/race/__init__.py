"""Race: what two ways of training the same policy on the same machine have in common."""
