"""Trees of new tokens: the rows of bits that paged_attention takes as tree_mask, and their making from parents."""

from libc.stdint cimport INT32_MAX, int64_t, uint64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport CPU, INT64
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor
from pagecore.ops.args cimport index_array
from pagecore.ops.arguments._overlap cimport check_apart

import operator
from collections.abc import Iterable
from sys import modules

import numpy as np

from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedDtype, UnsupportedOption, shown

cdef enum:
    WORD_BITS = 64


cdef class TreeMask:
    """The bits of a tree, and the positions of its tokens if the caller gives them."""

    cdef int check_apart_from(self, Tensor out) except -1:
        check_apart(out, "out", self.bits, "tree_mask")
        return check_apart(out, "out", self.positions, "positions")

    cdef bint is_on_host(self) noexcept:
        return are_on_host((self.bits, self.positions))

    cdef int send(self, const Place* place) except -1:
        self.bits = to_device(self.bits, "tree_mask", place)
        self.positions = None if self.positions is None else to_device(self.positions, "positions", place)
        return 0

    cdef TreeMask on_host(self, const Place* place):
        cdef TreeMask copy = TreeMask()
        copy.bits, copy.words = to_host(self.bits, place), self.words
        copy.positions = None if self.positions is None else to_host(self.positions, place)
        return copy

    cdef Tree native(self) noexcept:
        cdef Tree tree
        tree.bits, tree.words = <const uint64_t*>self.bits.data, self.words
        tree.positions = index_array(self.positions)
        return tree


cdef TreeMask read_tree(
        object tree_mask, object positions, object mask, bint is_selected, int64_t num_tokens, const Place* place):
    cdef TreeMask tree
    if tree_mask is None:
        if positions is not None:
            raise UnsupportedOption(
                "positions are those of the tokens of a tree; pass tree_mask too, or leave them out"
            )
        return None
    if mask is not None:
        raise UnsupportedOption("mask and tree_mask are both given; use one of them")
    if is_selected:
        raise UnsupportedOption("tree_mask and a selection of keys are both given; use one of them")
    tree = TreeMask()
    tree.bits = read_bits(tree_mask, place)
    check_length(tree.bits, "tree_mask", 0, num_tokens, "a row of bits for each row of query")
    tree.words = 1 if tree.bits.ndim == 1 else tree.bits.shape_[1]
    if tree.words == 0:
        raise ShapeError(f"tree_mask has shape {tree.bits.shape}; it needs at least one word for each token")
    if positions is not None:
        tree.positions = given_indices(positions, "positions", 1, "[num_tokens]", place)
        check_length(tree.positions, "positions", 0, num_tokens, "one for each row of query")
    return tree


cdef Tensor read_bits(object array, const Place* place):
    """Return the bits as int64, contiguous."""
    cdef Tensor tensor
    if isinstance(array, (list, tuple)):
        array = listed_bits(array)
    tensor = any_tensor(as_signed(array), "tree_mask")
    if tensor.dtype_code != INT64:
        raise UnsupportedDtype(f"tree_mask is {tensor.dtype}; it must be uint64 or int64, a bit for each new token")
    if tensor.ndim != 1 and tensor.ndim != 2:
        raise ShapeError(f"tree_mask has shape {tensor.shape}; it must be [num_tokens] or [num_tokens, words]")
    if tensor.device_type != CPU:
        check_reachable(tensor, "tree_mask", place)
        check_aligned(tensor, "tree_mask")
    if not is_contiguous(tensor) or <uintptr_t>tensor.data % 8:
        if tensor.device_type != CPU:
            raise ShapeError(
                f"tree_mask has shape {tensor.shape} and strides that leave gaps; on a device it must be contiguous")
        tensor = as_tensor(np.array(tensor.numpy(), order="C"))
    return tensor


cdef bint is_contiguous(Tensor tensor) noexcept:
    cdef int64_t words = 1 if tensor.ndim == 1 else tensor.shape_[1]
    if tensor.ndim == 2 and words > 1 and tensor.strides_[1] != 8:
        return False
    return tensor.shape_[0] <= 1 or tensor.strides_[0] == 8 * words


cdef object as_signed(object array):
    """Return a view of uint64 as int64, which has the same bits; anything else as it is."""
    try:
        dtype = str(getattr(array, "dtype", ""))
    except MemoryError:
        raise
    except Exception:  # the conversion that follows reports it
        return array
    if not dtype.endswith("uint64"):
        return array
    torch = modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.view(torch.int64)
    return array.view("int64")


def listed_bits(bits):
    """Return words in lists as uint64; as int64 if one is negative, with bit 63 set. Raise for other numbers."""
    try:
        check_whole(np.array(bits, dtype=object))
        try:
            return np.array(bits, dtype=np.uint64)
        except OverflowError:
            return np.array(bits, dtype=np.int64)  # a negative number is one whose bit 63 is set
    except MemoryError as error:
        raise NotEnoughMemory("tree_mask: the host has no memory for a copy as an array") from error
    except UnsupportedDtype:
        raise
    except Exception as error:
        raise ShapeError(f"tree_mask is not an array of integers: {shown(error)}") from error


cdef int check_whole(object words) except -1:
    """Raise UnsupportedDtype for a number that NumPy would truncate; lists of unequal lengths are left to NumPy."""
    for word in words.flat:
        if isinstance(word, (list, tuple, np.ndarray)):
            continue
        try:
            operator.index(word)
        except MemoryError:
            raise
        except Exception as error:
            raise UnsupportedDtype(
                f"tree_mask holds {shown(word)}; it must hold integers, a bit for each new token"
            ) from error
    return 0


def tree_mask(parents, *, words=None):
    """Return the rows of bits of trees of new tokens, the `tree_mask` of `paged_attention`.

    A token attends to itself and to its ancestors: bit i of its row is set for the i-th new token of its sequence.

    Parameters
    ----------
    parents : integers, [T], or a list with one such list for each sequence
        The index of each token's parent among the new tokens of its sequence, less than the token's own; -1 for a child
        of the last token before them.
    words : int, optional
        64-bit words of a row; by default the number that the longest sequence needs, at least 1.

    Returns
    -------
    numpy.ndarray, uint64 [T] or [T, words]
        One axis if a row has one word.

    Raises
    ------
    ShapeError
        A parent is not an earlier token, or `words` is too small.
    UnsupportedDtype
        Parents that are not integers.

    Notes
    -----
    Miao et al., "SpecInfer: Accelerating Generative Large Language Model Serving with Tree-based Speculative Inference
    and Verification", 2024.

    Examples
    --------
    >>> import pagecore
    >>> pagecore.tree_mask([-1, 0, 0, 1, 1, 2]).tolist()
    [1, 3, 5, 11, 19, 37]
    """
    cdef int64_t[::1] given
    cdef uint64_t[:, ::1] rows
    cdef int64_t wanted = 1, begin = 0
    is_nested = isinstance(parents, (list, tuple)) and len(parents) > 0 and is_list(parents[0])
    lists = [parent_array(each) for each in (parents if is_nested else (parents,))]
    for each in lists:
        wanted = max(wanted, (len(each) + WORD_BITS - 1) // WORD_BITS)
    if words is not None:
        wanted = words_of(words, wanted)
    try:
        result = np.zeros((sum(map(len, lists)), wanted), np.uint64)
    except MemoryError as error:
        raise NotEnoughMemory(
            f"words is {wanted}; the rows of {sum(map(len, lists))} tokens do not fit in memory: pass fewer"
        ) from error
    rows = result
    for each in lists:
        given = each
        check_parents(given)
        if len(each):
            write_tree(&given[0], given.shape[0], wanted, &rows[begin, 0], NULL)
        begin += given.shape[0]
    return result[:, 0].copy() if wanted == 1 else result


cdef bint is_list(object parents):
    """Return True for a list or an array of parents, False for the parent of one token."""
    try:
        axes = getattr(parents, "ndim", None)
    except MemoryError:
        raise
    except Exception:  # the conversion that follows reports it
        return False
    return isinstance(parents, Iterable) if axes is None else axes > 0


cdef int64_t words_of(object words, int64_t least) except -1:
    """Return the words of a row that the caller asks for, at least `least`."""
    try:
        if isinstance(words, bool):
            raise TypeError("a bool is not an integer")
        number = operator.index(words)
    except MemoryError:
        raise
    except Exception as error:
        raise ShapeError(f"words is {shown(words)}; expected an integer of at least {least}") from error
    if number < least:
        raise ShapeError(f"words is {shown(number)}; the longest sequence needs {least} words of 64 bits")
    if number > INT32_MAX:
        raise ShapeError(f"words is {shown(number)}; expected {least} to {INT32_MAX}")
    return number


cdef object parent_array(object parents):
    cdef Tensor tensor = index_tensor(parents, "parents", 1, "[num_tokens]", NULL)
    return np.array(tensor.numpy(), np.int64)


cdef int check_parents(int64_t[::1] parents) except -1:
    cdef int64_t wrong
    if parents.shape[0] == 0:
        return 0
    wrong = first_wrong_parent(&parents[0], parents.shape[0])
    if wrong < parents.shape[0]:
        raise ShapeError(
            f"parents[{wrong}] is {parents[wrong]}; a parent is an earlier token, 0 to {wrong - 1}, or -1"
            if wrong > 0 else f"parents[0] is {parents[0]}; the first token has no parent among them: use -1"
        )
    return 0
