"""Families whose code is not in transformers: published with their weights, or served by vLLM and SGLang."""
