"""Tensors: the class, their memory, and their streams."""
