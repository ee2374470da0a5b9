"""Parts of bench/soak.py: engines, faults drawn at random, and hand-over."""
