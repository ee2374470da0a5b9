"""Launches of conversions of stored rows and states."""
