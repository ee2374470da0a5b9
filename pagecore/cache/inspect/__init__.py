"""Read-only views of a paged cache: its layers and arrays, statistics, and the holders of each block."""
