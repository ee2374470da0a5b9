"""Loading: what stores have of a prompt, and its transfers to the host tier."""
