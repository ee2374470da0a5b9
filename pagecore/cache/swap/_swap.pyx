"""Swap spaces: host memory to which the blocks of preempted sequences move, and from which they return."""

include "transfer.pxi"
include "contents.pxi"
include "swap.pxi"
