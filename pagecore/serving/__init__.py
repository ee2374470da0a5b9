"""Serving on top of a cache: a continuous-batching scheduler, trace replay, a memory planner, and the demo.

Import each name from its module. The package imports none of them, so that `pagecore info` starts fast.
"""
