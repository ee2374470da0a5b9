"""What the attention kernels are launched with, for the report."""

from pagecore.ops.cuda.abi_attention cimport PcLaunchShape, pc_decode_shape, pc_general_shape, pc_prefill_shape


def launch_shape(str entry, tuple arguments):
    """Return the threads and the dynamic shared bytes of a block; None for kernels that are not of attention."""
    cdef PcLaunchShape shape
    if entry == "decode":
        shape = pc_decode_shape(int(arguments[1]))
    elif entry == "prefill":
        shape = pc_prefill_shape(int(arguments[1]), arguments[2] == "Full")
    elif entry == "general":
        shape = pc_general_shape(int(arguments[0]))
    else:
        return None
    return shape.threads, shape.shared_bytes
