// The layout of an array: an address, a shape and strides, without an owner.
//
// Strides are in bytes and may be negative, 0, or not a multiple of the item size. A view of foreign memory passes
// `check_layout` once. After that its element count, its bytes and its extent fit int64.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pagecore/arrays/dtypes/dtype.hpp"
#include "pagecore/native/checks.hpp"

namespace pagecore {

inline constexpr int kMaxDims = 8;

struct ArrayView {
  char* data = nullptr;  // address of element 0
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
  int dtype = 0;             // index in kDTypes
  int device_type = kDLCPU;  // kDLCPU or kDLCUDA
  int device_id = 0;
  bool readonly = false;
};

// The bytes that the elements span, relative to `data`: [low, high). A negative stride makes low negative.
struct Extent {
  int64_t low = 0;
  int64_t high = 0;
};

[[nodiscard]] inline int item_bytes(const ArrayView& view) { return itemsize(static_cast<DType>(view.dtype)); }

[[nodiscard]] inline int64_t element_count(int ndim, const int64_t* shape) {
  int64_t count = 1;
  for (int i = 0; i < ndim; ++i) count *= shape[i];
  return count;
}

// Return the element count of a shape. Axes too long to address are errors even if another axis is empty.
inline int64_t checked_element_count(int ndim, const int64_t* shape, int item) {
  PC_EXPECTS(ndim >= 0 && ndim <= kMaxDims, ShapeError, "the array has ", ndim, " axes; a tensor has at most ",
             kMaxDims);
  int64_t bytes = item;
  bool empty = false;
  for (int i = 0; i < ndim; ++i) {
    PC_EXPECTS(shape[i] >= 0, ShapeError, "axis ", i, " has length ", shape[i], "; lengths start at 0");
    empty = empty || shape[i] == 0;
    const bool overflow = __builtin_mul_overflow(bytes, std::max<int64_t>(shape[i], 1), &bytes);
    PC_EXPECTS(!overflow, ShapeError, "axis ", i, " of length ", shape[i],
               " brings the array past 2^63 - 1 bytes; use fewer or smaller axes");
  }
  return empty ? 0 : bytes / item;
}

inline Extent checked_extent(const ArrayView& view) {
  const int item = item_bytes(view);
  Extent extent;
  if (checked_element_count(view.ndim, view.shape, item) == 0) return extent;
  extent.high = item;
  for (int i = 0; i < view.ndim; ++i) {
    int64_t reach = 0;
    int64_t& end = view.strides[i] < 0 ? extent.low : extent.high;
    const bool overflow =
        __builtin_mul_overflow(view.shape[i] - 1, view.strides[i], &reach) || __builtin_add_overflow(end, reach, &end);
    PC_EXPECTS(!overflow, ShapeError, "axis ", i, " of length ", view.shape[i], " and stride ", view.strides[i],
               " bytes reaches past 2^63 - 1 bytes");
  }
  return extent;
}

inline void check_layout(const ArrayView& view) {
  const Extent extent = checked_extent(view);
  PC_EXPECTS(view.data != nullptr || extent.high == extent.low, DeviceError,
             "the array has elements but no address; its framework has not allocated it");
}

// Set row-major strides without gaps; the shape has passed checked_element_count.
inline void set_contiguous_strides(ArrayView& view) {
  int64_t stride = item_bytes(view);
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= std::max<int64_t>(view.shape[i], 1);
  }
}

// Return true if the elements are adjacent in row-major order. Strides of axes with fewer than two elements are
// ignored.
[[nodiscard]] inline bool is_contiguous(const ArrayView& view) {
  if (element_count(view.ndim, view.shape) == 0) return true;
  int64_t expected = item_bytes(view);
  for (int i = view.ndim - 1; i >= 0; --i) {
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

// Give `view` a new shape over the same elements in row-major order. Return false, with `view` unchanged, if that needs
// a copy.
//
// Both shapes are walked together. A run of old axes is matched with a run of new axes of the same element count. The
// run remains a view if its old axes are nested without gaps:
//
//   old  [2, 3 | 4]      2*3 == 6: axis 0 must stride over exactly 3 rows
//   new  [6    | 2, 2]
[[nodiscard]] inline bool try_reshape(ArrayView& view, int ndim, const int64_t* shape) {
  ArrayView result = view;
  result.ndim = ndim;
  std::copy_n(shape, ndim, result.shape);
  if (element_count(ndim, shape) == 0) {
    set_contiguous_strides(result);
    view = result;
    return true;
  }
  int64_t old_shape[kMaxDims];
  int64_t old_strides[kMaxDims];
  int old_ndim = 0;
  for (int i = 0; i < view.ndim; ++i) {
    if (view.shape[i] == 1) continue;
    old_shape[old_ndim] = view.shape[i];
    old_strides[old_ndim++] = view.strides[i];
  }
  int i = 0;
  int j = 0;
  while (i < old_ndim && j < ndim) {
    int i_end = i + 1;
    int j_end = j + 1;
    int64_t old_run = old_shape[i];
    int64_t new_run = shape[j];
    while (old_run != new_run) {
      if (old_run < new_run) {
        old_run *= old_shape[i_end++];
      } else {
        new_run *= shape[j_end++];
      }
    }
    for (int k = i; k + 1 < i_end; ++k) {
      if (old_strides[k] != old_shape[k + 1] * old_strides[k + 1]) return false;
    }
    int64_t stride = old_strides[i_end - 1];
    for (int k = j_end - 1; k >= j; --k) {
      result.strides[k] = stride;
      stride *= shape[k];
    }
    i = i_end;
    j = j_end;
  }
  for (; j < ndim; ++j) result.strides[j] = item_bytes(view);  // only axes of length 1 are left
  view = result;
  return true;
}

}  // namespace pagecore
