"""One forward pass: prepare a batch, copy on write, stage it on a device, then commit or abandon it."""
