"""Strided views of memory: shapes, strides, indices and overlap."""
