"""Attention over a paged cache: the plan of a batch, the call, and merges of partial results."""

include "attention_checks.pxi"
include "float8.pxi"
include "attention.pxi"
include "merge.pxi"
include "pages.pxi"
