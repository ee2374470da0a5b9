"""Scores and selections of sparse attention."""
