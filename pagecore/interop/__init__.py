"""pagecore at home in other frameworks: `torch`, `jax` and `transformers`, each imported by whoever wants it."""
