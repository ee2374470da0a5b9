"""Traffic on a cache: a continuous-batching scheduler, the replay of recorded traces, the demo.

Import what is needed from its module; the package imports none, so that `pagecore info` starts fast.
"""
