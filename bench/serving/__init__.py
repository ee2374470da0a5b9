"""Benches of serving: scheduler, replay, states and metrics, with their traces."""
