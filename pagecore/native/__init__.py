"""Headers shared by all native code: ids, checks, rounding, and the translation of C++ exceptions."""
