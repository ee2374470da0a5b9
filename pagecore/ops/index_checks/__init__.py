"""Checks of index arrays against caches: on the host, and in debug mode on a device."""
