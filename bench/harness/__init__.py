"""Timing of benches: rounds against controls, figures, targets, and facts about the machine."""
