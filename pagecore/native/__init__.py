"""Headers shared by all native code: ids, checks and the translation of C++ exceptions."""
