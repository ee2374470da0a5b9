"""Hits: media of reused tokens, second hits, and prefixes that the host had before its stores."""
