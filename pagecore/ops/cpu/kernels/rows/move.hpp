// Gather, scatter and transfer: copies of runs of tokens or blocks between two memory layouts, with optional dtype
// conversion.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/kernels/simd/lines.hpp"
#include "pagecore/ops/cpu/moves.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Rows are converted in parts of this many elements.
constexpr int64_t kPart = 256;
// While a piece is moved the next piece is prefetched, or, in a longer row, the data this many bytes further on.
constexpr int64_t kFarBytes = 32768;
// The hardware prefetcher follows rows of at least this many bytes, which need fewer software prefetches.
constexpr int64_t kLongRow = 4096;

struct Piece {
  const char* source;  // null: write zeros
  char* target;
  int64_t count;
};

// Iterates over the pieces of all runs.
class Pieces {
 public:
  Pieces(const Move& move, const CopyRun* runs, int64_t num_runs) : move_(move), run_(runs), end_(runs + num_runs) {}

  // The next piece; its count is 0 after the last.
  PC_FORCE_INLINE Piece next() {
    if (left_ > 0) {
      if (piece_.source != nullptr) piece_.source += move_.source_piece;
      piece_.target += move_.target_piece;
    } else if (run_ != end_) {
      piece_.source = run_->source == kZeros ? nullptr : move_.source + run_->source * move_.source_unit;
      piece_.target = move_.target + run_->target * move_.target_unit;
      left_ = run_->count;
      ++run_;
    }
    piece_.count = left_ < move_.piece ? left_ : move_.piece;
    left_ -= piece_.count;
    return piece_;
  }

 private:
  const Move& move_;
  const CopyRun* run_;
  const CopyRun* end_;
  int64_t left_ = 0;  // tokens or blocks left of the current run
  Piece piece_{};
};

// Calls visit(source, target) for each row of a piece.
template <typename Visit>
inline void for_each_row(const MoveAxis* axes, int32_t num_axes, const char* source, char* target, Visit& visit) {
  if (num_axes > 2) {
    for (int64_t i = 0; i < axes->size; ++i) {
      for_each_row(axes + 1, num_axes - 1, source + i * axes->source_stride, target + i * axes->target_stride, visit);
    }
    return;
  }
  const MoveAxis outer = num_axes == 2 ? axes[0] : MoveAxis{1, 0, 0};
  const MoveAxis inner = num_axes > 0 ? axes[num_axes - 1] : MoveAxis{1, 0, 0};
  for (int64_t i = 0; i < outer.size; ++i) {
    for (int64_t j = 0; j < inner.size; ++j) {
      visit(source + i * outer.source_stride + j * inner.source_stride,
            target + i * outer.target_stride + j * inner.target_stride);
    }
  }
}

template <Float From, Float To>
PC_FORCE_INLINE void cast_elements(const char* source, char* target, int64_t count) {
  for_each_vector<From>(source, count, [&](int64_t i, Vec v, int64_t part) { store_part<To>(target, i, v, part); });
}

// Calls visit(first, count) for the parts of a row.
template <typename Visit>
PC_FORCE_INLINE void for_each_part(int64_t row, Visit&& visit) {
  for (int64_t i = 0; i < row; i += kPart) visit(i, row - i < kPart ? row - i : kPart);
}

template <Float From, Float To>
PC_FORCE_INLINE void cast_row(const char* source, char* target, int64_t row, int64_t ahead) {
  for_each_part(row, [&](int64_t first, int64_t count) {
    prefetch_bytes(source + first * kSize<From> + ahead, count * kSize<From>);
    cast_elements<From, To>(source + first * kSize<From>, target + first * kSize<To>, count);
  });
}

template <Float From, Float To>
PC_FORCE_INLINE void stream_cast(LineWriter& writer, const char* source, char* target, int64_t row, int64_t ahead) {
  for_each_part(row, [&](int64_t first, int64_t count) {
    prefetch_bytes(source + first * kSize<From> + ahead, count * kSize<From>);
    char* room = writer.reserve(target + first * kSize<To>, count * kSize<To>);
    cast_elements<From, To>(source + first * kSize<From>, room, count);
  });
}

// Calls copy(source, target, elements, ahead) for each row; the source `ahead` bytes further on is needed next.
template <typename Copy>
inline void move_pieces(const Move& move, const CopyRun* runs, int64_t num_runs, Copy&& copy) {
  Pieces pieces(move, runs, num_runs);
  MoveAxis axes[8];
  for (int i = 0; i < move.num_axes; ++i) axes[i] = move.axes[i];
  int64_t row = move.row;
  for (Piece piece = pieces.next(), next; piece.count > 0; piece = next) {
    next = pieces.next();
    if (move.varying == move.num_axes) {
      row = piece.count * move.scale;
    } else {
      axes[move.varying].size = piece.count * move.scale;
    }
    if (piece.source == nullptr) {
      auto clear = [&](const char*, char* target) {
        __builtin_memset(target, 0, static_cast<size_t>(row * move.target_itemsize));
      };
      for_each_row(axes, move.num_axes, piece.target, piece.target, clear);
      continue;
    }
    const bool far = row * move.source_itemsize > kFarBytes;
    const int64_t ahead = far ? kFarBytes : next.source != nullptr ? next.source - piece.source : 0;
    auto visit = [&](const char* source, char* target) { copy(source, target, row, ahead); };
    for_each_row(axes, move.num_axes, piece.source, piece.target, visit);
  }
}

// With a compile-time size, a short row takes a few instructions.
template <int64_t kBytes>
inline void copy_short_rows(const Move& move, const CopyRun* runs, int64_t num_runs) {
  move_pieces(move, runs, num_runs, [](const char* source, char* target, int64_t, int64_t ahead) {
    if constexpr (kBytes % kLine == 0) {
      copy_lines<2 * kLine>(target, source, kBytes, source + ahead);
    } else {
      __builtin_memcpy(target, source, kBytes);
    }
  });
}

inline void copy_rows(const Move& move, const CopyRun* runs, int64_t num_runs) {
  if (move.varying != move.num_axes) {
    switch (move.row * move.source_itemsize) {
      case 1: return copy_short_rows<1>(move, runs, num_runs);
      case 2: return copy_short_rows<2>(move, runs, num_runs);
      case 4: return copy_short_rows<4>(move, runs, num_runs);
      case 8: return copy_short_rows<8>(move, runs, num_runs);
      case 128: return copy_short_rows<128>(move, runs, num_runs);
      case 256: return copy_short_rows<256>(move, runs, num_runs);
      default: break;
    }
  }
  const int64_t size = move.source_itemsize;
  move_pieces(move, runs, num_runs, [=](const char* source, char* target, int64_t row, int64_t ahead) {
    if (row * size >= kLongRow) return copy_row<4 * kLine>(target, source, row * size, source + ahead);
    copy_row<2 * kLine>(target, source, row * size, source + ahead);
  });
}

inline void stream_rows(const Move& move, const CopyRun* runs, int64_t num_runs) {
  LineWriter writer;
  const int64_t size = move.source_itemsize;
  move_pieces(move, runs, num_runs, [&](const char* source, char* target, int64_t row, int64_t ahead) {
    writer.write(target, source, row * size, ahead);
  });
  writer.finish();
  finish_streams();
}

template <Float From, Float To>
inline void cast_rows(const Move& move, const CopyRun* runs, int64_t num_runs) {
  if (!move.streams) {
    move_pieces(move, runs, num_runs, cast_row<From, To>);
    return;
  }
  LineWriter writer;
  move_pieces(move, runs, num_runs, [&](const char* source, char* target, int64_t row, int64_t ahead) {
    stream_cast<From, To>(writer, source, target, row, ahead);
  });
  writer.finish();
  finish_streams();
}

// The caller has checked the source and target of every run.
inline void move_runs(const Move& move, const CopyRun* runs, int64_t num_runs) {
  if (!move.converts) return move.streams ? stream_rows(move, runs, num_runs) : copy_rows(move, runs, num_runs);
  with_float(move.from, [&]<Float From>() {
    with_float(move.to, [&]<Float To>() {
      if constexpr (From != To) cast_rows<From, To>(move, runs, num_runs);
    });
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
