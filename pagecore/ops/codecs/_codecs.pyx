"""Conversion between numbers and stored formats: arrays, blocks, and states at rest."""

include "conversions.pxi"
include "device_codec.pxi"
include "latent_codec.pxi"
include "quantize.pxi"
include "state_codec.pxi"
include "transfer.pxi"
