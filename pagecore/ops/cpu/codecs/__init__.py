"""Conversions of stored rows and states."""
