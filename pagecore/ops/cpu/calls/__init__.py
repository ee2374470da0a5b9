"""Calls of the host kernels: Tensors become their arguments."""
