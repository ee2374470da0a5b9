"""Benchmarks: ``python -m bench NAME``. Each figure is a ratio to a named control, measured in the same run."""
