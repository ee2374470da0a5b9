"""Conversion between numbers and stored formats: arrays, blocks, and states at rest."""
