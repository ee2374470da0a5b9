"""Parameters of encoders and codecs of sound."""
