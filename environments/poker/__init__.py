"""No-limit hold'em of two to six seats as an environment with turns."""
