"""Forward passes of a generation: its rows, and the attention of each layer."""
