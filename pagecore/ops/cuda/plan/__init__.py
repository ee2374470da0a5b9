"""Plans of attention in device memory, and the structs that kernels take."""
