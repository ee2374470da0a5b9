"""Shared by all native code: ids, checks, rounding, translated exceptions, and containers of C++ for Cython."""
