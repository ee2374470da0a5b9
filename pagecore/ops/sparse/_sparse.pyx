"""Sparse selection: summaries of keys, scores of blocks and tokens, and the choice of the best."""

include "select.pxi"
include "summaries.pxi"
include "score.pxi"
