"""The CUDA kernels, run on the host from the sources that a GPU is given.

native/     host bodies of the primitives: threads are fibers, a block at a time
build.py    compiles an instance of the manifest when a test asks for it, into build/emulator
runtime.py  a `pagecore.arrays.cuda.Runtime`, so that public functions run as on a device; streams.py its streams
kernels/    kernels of the emulator's own tests, and faults planted in them

An access outside its allocation or buffer, to freed memory, at a wrong alignment; shared memory that nobody has written
or that a copy has in flight; two accesses without the barrier or fence between that they need; a collective or barrier
that some threads do not reach; copies that nobody waits for; an overflow of int, an index outside a local array: each
ends the launch with an `EmulatorError` that names kernel, block, thread and line.

It does not see: a read and a later write of device memory by different threads or blocks (another `seed` shows those by
their numbers), how a GPU rounds and sums within one matrix instruction, and how long anything takes.
"""
