"""Writing: copies to stores, prefixes that are streamed to them while they grow, and deletions."""
