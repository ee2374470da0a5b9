"""Rules of layers: types, windows, scales, latents, states, sharing."""
