"""transfer_blocks: check the arguments, copy or convert."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor
from pagecore.native.std cimport vector
from pagecore.ops.args cimport BlockArray, fill_block_arrays, pair_column
from pagecore.ops.arguments._arguments cimport Place, await_arrays, note_written, read_flag
from pagecore.ops.arguments._overlap cimport check_all_apart
from pagecore.ops.cpu._cpu cimport convert_blocks as run_convert_blocks
from pagecore.ops.cpu.calls._calls cimport check_independent, check_transferred, transfer_blocks as run_transfer
from pagecore.ops.cuda.moves._moves cimport transfer_blocks as launch_transfer
from pagecore.ops.index_checks._index_checks cimport (
    check_axes,
    check_cast,
    check_index_apart,
    check_paged,
    check_targets,
    debug_transferred,
    debugging,
    first_tensors,
    label,
    lowest_block,
    matching_arrays,
    pair_ids,
    tensors_at,
)

import numpy as np

from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption


def transfer_blocks(
    source_caches,
    target_caches,
    pairs,
    *,
    source_scales=None,
    target_scales=None,
    independent=False,
    null_block=True,
    stream=None,
):
    """Copy whole blocks from caches to other caches, which may differ in layout, dtype, format and number of blocks.

    All arrays are on one device, the host or CUDA. For CUDA arrays `pairs` may be on the host; the launch then carries
    them. Copies between devices are not supported; use the framework that owns the memory.

    Parameters
    ----------
    source_caches : array, [num_blocks, block_size, ...], or list or tuple of arrays
        Any dtype of `DType`, strides, and rank of at least 2.
    target_caches : array, or list or tuple of arrays
        One target for each source, written in place. Its axes after the first are those of its source. Its dtype is
        that of its source; or both are float32, float16 or bfloat16, and numbers are rounded to nearest even; or one
        of them has a format, see `source_scales`. A target
        must not share memory with a source or with another target; use `copy_blocks` to copy inside a cache.
    pairs : integers, [n, 2]
        (source block, target block), the same for every cache; see `null_block` for block 0. Pairs are copied in order,
        so the last of several pairs with one target wins. Pairs in CUDA memory are copied one after another unless they
        are `independent`; pairs on the host are copied in launches of pairs without common blocks.
    source_scales, target_scales : optional
        The scales of caches with a format, which are then converted as by `dequantize` and `quantize`; the scales of
        the target are computed. Lists have an entry for each cache. An entry is

        - None for a cache of plain numbers, [num_blocks, block_size, Hkv, D];
        - a float, or one number for each head, for "float8_e4m3fn" and "float8_e5m2": the given factor;
        - the plane of stored scales of the other formats of `write_kv`, or (plane, factor) for "nvfp4".

        Bytes are copied if format and factors of both sides are equal. If both entries are None, arrays of one dtype
        are copied whatever they hold. Latents [num_blocks, block_size, row] with rows of "fp8_ds_mla" or "nvfp4_ds_mla"
        on one side need no scales; "float8_e4m3fn" takes its factor.
    independent : bool
        The caller's claim that no block is a target twice. Pairs in CUDA memory are then copied in parallel. The claim
        is checked for pairs on the host and under `debug`; otherwise a false claim leaves a mixture of both sources in
        the target.
    null_block : bool
        Refuse block 0, the null block of the caches of pagecore. False copies block 0 as any other, between caches of
        other libraries, where it holds tokens.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `source_caches`.

    Raises
    ------
    InvalidBlock
        A block is outside of a cache, or the null block. Pairs in CUDA memory are checked under `debug` only; otherwise
        such pairs are skipped.
    UnsupportedOption
        `independent` is claimed for pairs that are not.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other, are not supported, or cannot be written. After every error nothing has been
        copied.
    """
    cdef bint many = isinstance(source_caches, (list, tuple)), is_independent = read_flag(independent, "independent")
    cdef int64_t lowest = lowest_block(null_block)
    cdef list given = list(source_caches) if many else [source_caches]
    cdef Place place
    cdef list sources = first_tensors(&place, given, "source_caches", many, stream)
    check_paged(sources, "source_caches", many)
    cdef list listed = matching_arrays(target_caches, "target_caches", many, len(sources), "source_caches")
    cdef list targets = tensors_at(listed, "target_caches", many, &place)
    check_paged(targets, "target_caches", many)
    cdef Conversions conversions = conversions_of(sources, targets, source_scales, target_scales, many, &place)
    check_targets(targets, "target_caches", many)
    check_all_apart(targets, "target_caches", sources, "source_caches", many)
    cdef Tensor ids = pair_ids(pairs, &place)
    if ids is None:
        return
    if is_independent and ids.device_type == CPU:
        check_independent(ids, False)
    check_index_apart(targets, "target_caches", many, ids, "pairs")
    if conversions.source_planes or conversions.target_planes or not conversions.is_empty():
        check_planes(conversions, sources, targets, ids)
    if place.device_type == CPU:
        if conversions.is_empty():
            run_transfer(sources, targets, ids, lowest)
        else:
            convert(conversions, sources, targets, ids, lowest)
        return
    await_arrays((source_caches, pairs, source_scales, target_scales), &place)
    if ids.device_type == CPU:
        check_transferred(sources, targets, ids, lowest)
    elif debugging():
        debug_transferred(sources, targets, ids, is_independent, lowest, &place)
    convert_on_device(conversions, sources, targets, ids, is_independent, lowest, &place)


cdef int convert_on_device(
        Conversions conversions, list sources, list targets, Tensor ids, bint independent, int64_t lowest,
        const Place* place) except -1:
    """Launch the conversions and copies of a call. All kernels are loaded before the first one writes."""
    cdef int64_t num_sources = min([(<Tensor>each).shape_[0] for each in sources], default=0)
    cdef int64_t num_targets = min([(<Tensor>each).shape_[0] for each in targets], default=0)
    if not conversions.is_empty():
        conversions.on_device.prepare(ids, independent, lowest, num_sources, num_targets, place)
    if conversions.copied:
        launch_transfer(
            [pair[0] for pair in conversions.copied], [pair[1] for pair in conversions.copied], ids, independent,
            lowest, place)
    conversions.on_device.launch(place)
    for tensor in (*targets, *conversions.target_planes):
        note_written(tensor, place)
    return 0


cdef Conversions conversions_of(
        list sources, list targets, object source_scales, object target_scales, bint many, const Place* place):
    """Return the conversions of a call, and check the shapes and dtypes of the caches that are copied."""
    cdef Conversions conversions = Conversions.__new__(Conversions)
    cdef list of_sources = listed_scales(source_scales, "source_scales", many, len(sources))
    cdef list of_targets = listed_scales(target_scales, "target_scales", many, len(sources))
    cdef Tensor source, target
    cdef Py_ssize_t i
    cdef bint converts
    for i in range(len(sources)):
        source, target = <Tensor>sources[i], <Tensor>targets[i]
        converts = of_sources[i] is not None or of_targets[i] is not None
        if converts or are_latents(source, target):
            if add_conversion(conversions, source, of_sources[i], target, of_targets[i], i, many, place):
                continue
        check_axes(target, "target_caches", source, "source_caches", i, many, 1)
        check_cast(target, "target_caches", source, "source_caches", i, many)
        conversions.copied.append((source, target))
    return conversions


cdef list listed_scales(object scales, str name, bint many, Py_ssize_t count):
    if scales is None:
        return [None] * count
    return matching_arrays(scales, name, True, count, "source_caches") if many else [scales]


cdef bint add_conversion(
        Conversions conversions, Tensor source, object source_scale, Tensor target, object target_scale, Py_ssize_t i,
        bint many, const Place* place) except -1:
    """Add the conversion of a pair of caches; return False if both are plain. Errors name the pair."""
    try:
        if source.ndim == 3:
            add_latents(conversions, source, source_scale, target, target_scale, place)
            return True
        return add_caches(conversions, source, source_scale, target, target_scale, place)
    except (ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError) as error:
        pair = f"{label('source_caches', i, many)} and {label('target_caches', i, many)}"
        raise type(error)(f"{pair}: {error}") from None


cdef int check_planes(Conversions conversions, list sources, list targets, Tensor ids) except -1:
    """Raise an error if a plane of scales that is written cannot be, or shares memory with another array."""
    check_targets(conversions.target_planes, "target_scales", True)
    check_all_apart(conversions.target_planes, "target_scales", conversions.source_planes, "source_scales", True)
    check_all_apart(conversions.target_planes, "target_scales", sources, "source_caches", True)
    check_all_apart(targets, "target_caches", conversions.target_planes, "target_scales", True)
    check_all_apart(targets, "target_caches", conversions.source_planes, "source_scales", True)
    return check_index_apart(conversions.target_planes, "target_scales", True, ids, "pairs")


cdef int convert(Conversions conversions, list sources, list targets, Tensor ids, int64_t lowest) except -1:
    """Check the pairs for all caches, then convert and copy; the ids are copied, so that these are the checked ones."""
    cdef Tensor pairs = as_tensor(np.array(ids.numpy()))
    cdef vector[BlockArray] copied_sources, copied_targets
    check_transferred(sources, targets, pairs, lowest)
    fill_block_arrays(copied_sources, [pair[0] for pair in conversions.copied])
    fill_block_arrays(copied_targets, [pair[1] for pair in conversions.copied])
    return run_convert_blocks(
        conversions.caches, conversions.latents, copied_sources, copied_targets, pair_column(pairs, 0),
        pair_column(pairs, 1), lowest)
