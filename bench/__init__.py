"""Microbenchmarks: ``python -m bench NAME``. Every figure is a ratio to a named control, measured in the same run."""
