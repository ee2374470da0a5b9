"""Bytes of weights: formats, and what a quantised checkpoint leaves as it is."""
