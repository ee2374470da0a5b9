"""Calls of the host kernels: Tensors become their arguments."""

include "attention.pxi"
include "latent_rows.pxi"
include "moves.pxi"
