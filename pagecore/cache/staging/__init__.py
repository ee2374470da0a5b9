"""Arrays of a step as tensors, and on CUDA the device's copies of them and of the block tables."""
