"""Encoder outputs of cross attention: their blocks, and the sequences that share them."""
