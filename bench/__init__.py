"""Microbenchmarks: ``python -m bench NAME``. Every figure is a ratio to a named control, taken in the same run."""
