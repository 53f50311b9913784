"""The built-in variants, one file per family: the equation, the paper, what differs, and the combination."""
