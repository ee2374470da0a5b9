"""Headers shared by all native code: ids, checks, rounding, exceptions of C++; and parts of its library for Cython."""
