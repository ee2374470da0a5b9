"""Specs of layers, and the planes that they store."""
