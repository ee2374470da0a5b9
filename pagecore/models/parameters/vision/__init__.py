"""Parameters of vision towers and their projectors."""
