"""Benches of the tiers: stores, hand-over, backup and promotion, events."""
