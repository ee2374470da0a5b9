"""Integrations with other frameworks: `torch`, `jax` and `transformers`. Each is imported on demand."""
