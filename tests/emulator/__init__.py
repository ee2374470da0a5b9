"""Emulator of the CUDA kernels: it runs the same sources on the host.

native/     host bodies of the primitives; threads are fibers, and one block runs at a time
build.py    compiles an instance of the manifest into build/emulator when a test first needs it
runtime.py  implements `pagecore.arrays.cuda.current.Runtime`, so that public functions run as on a device
streams.py  streams, events and graphs of that runtime
faults.py   plants faults in marked lines of kernels; mutants.py removes synchronisations
kernels/    kernels of the emulator's own tests

These errors end a launch with an `EmulatorError` that names kernel, block, thread and line:

- an access outside its allocation or buffer, to freed memory, or at a wrong alignment
- a read of shared memory that is uninitialised or that a copy has in flight
- two accesses without the barrier or fence that they need
- a write to device memory that a thread reads by `load_vector_once`
- a collective or barrier that only some of the threads reach
- asynchronous copies without a wait
- an overflow of int, or an index outside a local array
- a launch that exceeds the grid, the shared memory or the parameters of an architecture
- a call of the host that ends a capture: a wait, an allocation, an event of a stream outside of the graph

A write to device memory is compared with the last read of each byte, and reads of an allocation are recorded only from
the first write of a kernel to it on; another `seed` shows what is left as wrong results. The emulator does not model
the rounding inside one matrix instruction, or time.
"""
