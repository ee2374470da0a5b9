"""Copies between a device and host memory, and the streams that they run on."""
