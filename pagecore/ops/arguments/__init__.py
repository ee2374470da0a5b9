"""Conversion and checks of the arguments of functions on arrays."""
