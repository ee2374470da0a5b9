"""The host tier: prefixes of a cache in host memory."""
