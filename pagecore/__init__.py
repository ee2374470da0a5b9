"""The paged key-value cache of a transformer, as a library that belongs to no framework."""
