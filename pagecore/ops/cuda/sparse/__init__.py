"""Launches of sparse selection."""
