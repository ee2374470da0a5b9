"""Benches of the kernels on the host, with their loads and controls."""
