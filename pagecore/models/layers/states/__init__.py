"""Layers that keep recurrent states: their kinds and planes."""
