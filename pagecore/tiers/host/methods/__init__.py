"""Methods of a host tier."""
