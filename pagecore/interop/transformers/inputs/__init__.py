"""Arguments of a model's forward pass and of `generate`, read on the host."""
