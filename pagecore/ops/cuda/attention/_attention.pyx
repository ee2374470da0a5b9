"""Launches of paged attention."""

include "latent_shapes.pxi"
include "shapes.pxi"
include "attention.pxi"
