"""Methods of `PagedKVCache` by subject. Each passes the parts of the cache to the module that does the work."""
