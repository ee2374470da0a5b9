"""Swap spaces: host memory to which the blocks of preempted sequences move, and from which they return."""
