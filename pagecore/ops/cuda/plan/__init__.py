"""Plans of attention on a device, and their schedule."""
