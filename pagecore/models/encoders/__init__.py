"""Models with an encoder, whose decoder stores keys and values of the encoder's outputs."""
