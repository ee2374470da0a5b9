"""Selection of the attention kernel for a call, and its launch shape, for launches and the report."""

from pagecore.ops.cuda.plan.abi_attention cimport (
    PC_FLOAT16,
    PC_PLAIN,
    PcFloat,
    PcFormat,
    PcLaunchShape,
    PcMatrixDims,
    PcStoredKernel,
    pc_decode_sealed_shape,
    pc_decode_shape,
    pc_general_shape,
    pc_matrix_dims,
    pc_prefill_sealed_shape,
    pc_prefill_shape,
    pc_prefill_stored_kernel,
    pc_prefill_stored_shape,
    pc_stored_kernel,
    pc_stored_shape,
)

from pagecore.errors import UnsupportedOption
from pagecore.ops.cuda.compilation.manifest import instances

DTYPES = ("float32", "float16", "bfloat16")  # by PcFloat
ELEMENTS = ("float", "pc_half", "pc_bfloat16")
# Names by their parts, so that a call does not build strings.
cdef dict _names = {}
cdef str _variant = "Plain"
cdef set _variant_names = set()  # names that _check_variant has accepted, so that timed calls skip the search


cdef str select_kernel(const KernelQuery& query, bint decode, PcLaunchShape* shape):
    cdef PcMatrixDims dims
    dims.key = 0
    if query.sealed:
        return _select_sealed(query, decode, shape)
    if query.key_format != PC_PLAIN or query.value_format != PC_PLAIN:
        return _select_stored(query, decode, shape)
    if query.aligned and query.query_type != 0 and query.query_type == query.key_type == query.value_type:
        dims = pc_matrix_dims(query.head_dim, query.value_dim)
    # Prompts of halves have no registers for float8 outputs, here and below.
    if query.codes_out and not decode and query.query_type == PC_FLOAT16:
        dims.key = 0
    if dims.key == 0 or query.selected and (query.full or not decode):
        return _select_general("general", query, shape)
    if decode:
        return _select_decode("decode", query, dims, shape)
    shape[0] = pc_prefill_shape(dims.key, dims.value, query.full)
    name = _matrix_name("prefill", query.query_type, dims, "Full" if query.full else _variant)
    if _variant != "Plain" and name not in _variant_names:
        _check_variant(name, query.full)
    return name


cdef str _select_decode(str entry, const KernelQuery& query, PcMatrixDims dims, PcLaunchShape* shape):
    if query.selected:  # few instances: dims are padded to a power of two
        dims.key = dims.value = 64 if dims.key == 64 else 128 if dims.key <= 128 else 256
    shape[0] = (
        pc_decode_sealed_shape(dims.key, dims.value) if query.sealed else pc_decode_shape(dims.key, dims.value))
    options = "Selected" if query.selected else "Full" if query.full else "Plain"
    return _matrix_name(entry, query.query_type, dims, options)


cdef str _select_general(str entry, const KernelQuery& query, PcLaunchShape* shape):
    cdef int dim = 64
    while dim < max(query.head_dim, query.value_dim):
        dim *= 2
    shape[0] = pc_general_shape(dim)
    return _general_name(entry, dim, "SelectedFull" if query.selected else "Full" if query.full else "Plain")


cdef str _select_stored(const KernelQuery& query, bint decode, PcLaunchShape* shape):
    """Select the kernel of a call of which keys or values, or both, have a format."""
    cdef PcFormat key = <PcFormat>query.key_format, value = <PcFormat>query.value_format
    cdef PcFloat query_type = <PcFloat>query.query_type
    cdef PcStoredKernel kernel
    if decode:
        kernel = pc_stored_kernel(key, value, query_type, query.head_dim, query.value_dim)
    else:
        kernel = pc_prefill_stored_kernel(key, value, query_type, query.head_dim, query.value_dim)
    # Of selected keys, prompts have no instance, nor have dims above 128: its registers would spill.
    unserved = query.selected and (not decode or query.full or kernel.dim > 128)
    # Nor have halves of 256 dims with further options, for the same reason.
    unserved |= query.full and kernel.type == PC_FLOAT16 and kernel.dim > 128
    unserved |= query.codes_out and not decode and kernel.type == PC_FLOAT16
    if unserved or not query.aligned or kernel.dim == 0 or (decode and not query.aligned_scales):
        return _select_general("general_stored", query, shape)
    options = "Selected" if query.selected else "Full" if query.full else "Plain"
    if decode:
        shape[0] = pc_stored_shape(kernel.bits, kernel.dim)
        return _stored_name("decode_stored", kernel, options)
    shape[0] = pc_prefill_stored_shape(kernel.bits, kernel.dim, query.full)
    return _stored_name("prefill_stored", kernel, options)


cdef str _select_sealed(const KernelQuery& query, bint decode, PcLaunchShape* shape):
    cdef PcMatrixDims dims
    dims.key = 0
    if query.aligned and query.sealed_matrix and query.query_type != 0 and (
            query.query_type == query.key_type == query.value_type):
        dims = pc_matrix_dims(query.head_dim, query.value_dim)
    if query.codes_out and not decode and query.query_type == PC_FLOAT16:
        dims.key = 0
    if dims.key == 0 or query.selected and (query.full or not decode):
        return _select_general("general_sealed", query, shape)
    if decode:
        return _select_decode("decode_sealed", query, dims, shape)
    shape[0] = pc_prefill_sealed_shape(dims.key, dims.value, query.full)
    return _matrix_name("prefill_sealed", query.query_type, dims, "Full" if query.full else "Plain")


cdef str _stored_name(str entry, PcStoredKernel kernel, str options):
    key = (entry, kernel.type, kernel.bits, kernel.dim, options)
    name = _names.get(key)
    if name is None:
        name = _names[key] = f"{entry}<{ELEMENTS[kernel.type]},{kernel.bits},{kernel.dim},{options}>"
    return name


cdef str _matrix_name(str entry, int element, PcMatrixDims dims, str options):
    key = (entry, element, dims.key, dims.value, options)
    name = _names.get(key)
    if name is None:
        value = "" if dims.key == dims.value else f",{dims.value}"
        name = _names[key] = f"{entry}<{ELEMENTS[element]},{dims.key},{options}{value}>"
    return name


cdef str _general_name(str entry, int dim, str options):
    key = (entry, dim, options)
    name = _names.get(key)
    if name is None:
        name = _names[key] = f"{entry}<{dim},{options}>"
    return name


cdef int _check_variant(str name, bint full) except -1:
    available = [each.name for each in instances() if each.entry == "prefill" and _variant in each.arguments]
    if full or name not in available:
        raise UnsupportedOption(
            f"prefill variant {_variant!r} has no instance {name}; it has {', '.join(available)}. Leave "
            "use_prefill_variant for other dims, dtypes and options"
        )
    _variant_names.add(name)
    return 0


def prefill_variants():
    """Return the names of the variants of the prefill kernel, the default "Plain" first."""
    found = ["Plain"]
    for each in instances():
        if each.entry == "prefill" and each.arguments[2] not in ("Full", *found):
            found.append(each.arguments[2])
    return tuple(found)


def swap_prefill_variant(str name):
    """Select the prefill variant of later calls, and return the previous one; `name` is one of `prefill_variants`."""
    global _variant
    before, _variant = _variant, name
    return before


def attention_kernel(
        int head_dim, int value_dim, query_dtype, key_dtype, value_dtype, *, int key_format=0, int value_format=0,
        bint aligned=True, bint aligned_scales=True, bint full=False, bint selected=False, bint sealed=False,
        bint sealed_matrix=False, bint decode=False):
    """Return the name of the kernel that serves the decode or the prefill section of a call.

    Parameters
    ----------
    head_dim, value_dim : int
    query_dtype, key_dtype, value_dtype : {"float32", "float16", "bfloat16"}
    key_format, value_format : int
        By the order of `pagecore.arrays.dtypes.formats.FORMATS`, from 1 on; 0 for a cache without a format.
    aligned : bool
        True if every row of query, keys, values and output begins at a multiple of 16 bytes.
    aligned_scales : bool
        True if every row of scales begins at a multiple of 4 bytes.
    full : bool
        True if the call has a softcap, ALiBi slopes or a mask.
    selected : bool
        True if the call selects blocks or tokens.
    sealed : bool
        True if the first tokens of sequences are in sealed blocks; the caches are then without formats.
    sealed_matrix : bool
        True if groups, strides and dtypes of the sealed blocks allow matrix instructions in the section.
    decode : bool
        True for sequences with few queries. False for prefill, and for all sequences of a batch-invariant call.
    """
    cdef KernelQuery query
    cdef PcLaunchShape shape
    query.head_dim, query.value_dim = head_dim, value_dim
    query.query_type, query.key_type = DTYPES.index(query_dtype), DTYPES.index(key_dtype)
    query.value_type = DTYPES.index(value_dtype)
    query.key_format, query.value_format = key_format, value_format
    query.aligned, query.aligned_scales, query.full = aligned, aligned_scales, full
    query.selected, query.sealed, query.sealed_matrix, query.codes_out = selected, sealed, sealed_matrix, False
    return select_kernel(query, decode, &shape)


def launch_shape(str entry, tuple arguments):
    """Return the threads and the dynamic shared bytes of a block; None for kernels other than attention."""
    cdef PcLaunchShape shape
    value_dim = arguments[3] if len(arguments) > 3 else arguments[1] if len(arguments) > 1 else 0
    if entry == "decode":
        shape = pc_decode_shape(int(arguments[1]), int(value_dim))
    elif entry == "decode_sealed":
        shape = pc_decode_sealed_shape(int(arguments[1]), int(value_dim))
    elif entry == "prefill":
        shape = pc_prefill_shape(int(arguments[1]), int(value_dim), arguments[2] == "Full")
    elif entry == "prefill_sealed":
        shape = pc_prefill_sealed_shape(int(arguments[1]), int(value_dim), arguments[2] == "Full")
    elif entry == "decode_stored":
        shape = pc_stored_shape(int(arguments[1]), int(arguments[2]))
    elif entry == "prefill_stored":
        shape = pc_prefill_stored_shape(int(arguments[1]), int(arguments[2]), arguments[3] == "Full")
    elif entry in ("general", "general_stored", "general_sealed"):
        shape = pc_general_shape(int(arguments[0]))
    elif entry == "latent":
        return latent_launch_shape(arguments)
    else:
        return None
    return shape.threads, shape.shared_bytes
