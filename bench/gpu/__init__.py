"""Benches on a GPU: graphs of kernels, with their loads and controls; steps of the first run on a machine."""
