"""Block tables: the blocks of sequences in groups of layers, and the arrays of a step."""
