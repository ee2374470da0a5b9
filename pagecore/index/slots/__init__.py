"""Slots of single tokens, for engines with tables of their own."""
