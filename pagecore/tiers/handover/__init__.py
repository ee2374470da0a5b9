"""Handing sequences over between processes: exports, imports and their transports.

`pagecore.tiers` exports the names for users; no optional library is imported before a transport is made.
"""
