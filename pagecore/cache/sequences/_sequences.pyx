"""A sequence: its tokens and lengths, its hold on the prefix cache, and its encoder output."""

include "cross_contents.pxi"
include "prefix_hold.pxi"
include "sequence.pxi"
