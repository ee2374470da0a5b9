"""Tables of the structure of layers, by family."""
