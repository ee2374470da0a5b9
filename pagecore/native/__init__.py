"""What all native code shares: ids, checks and the translation of C++ exceptions (headers only)."""
