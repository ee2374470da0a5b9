"""Memory beyond the device: host, disk and remote tiers, hand-over between processes, and events.

Import each name from its module. The package imports none of them, so that none of their optional libraries is needed
before it is used.
"""
