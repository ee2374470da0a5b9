// Gather, scatter and transfer: runs of tokens or blocks between two arrangements in memory, cast on the way.
#pragma once

#include "pagecore/ops/cpu/kernels/convert.hpp"
#include "pagecore/ops/cpu/kernels/lines.hpp"
#include "pagecore/ops/cpu/moves.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Rows up to this many bytes are fetched ahead of their use; longer ones the machine sees coming.
constexpr int64_t kFetchBytes = 4096;
// From here on a row is streamed as it is; shorter ones are collected into lines first.
constexpr int64_t kDirectBytes = 1024;
constexpr int64_t kConvertElements = 1024;

struct Piece {
  const char* source;  // null: zeros
  char* target;
  int64_t count;
};

// The pieces of all runs, one after another.
class Pieces {
 public:
  Pieces(const Move& move, const Run* runs, int64_t num_runs) : move_(move), run_(runs), end_(runs + num_runs) {}

  // The next piece, or one without tokens when there are no more.
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
  const Run* run_;
  const Run* end_;
  int64_t left_ = 0;  // of the run that piece_ belongs to
  Piece piece_{};
};

// visit(source, target) for each row of a piece.
template <typename Visit>
inline void for_each_row(const MoveAxis* axes, int32_t num_axes, const char* source, char* target, Visit& visit) {
  if (num_axes == 0) {
    visit(source, target);
    return;
  }
  const MoveAxis axis = *axes;
  for (int64_t i = 0; i < axis.size; ++i) {
    if (num_axes == 1) {
      visit(source, target);
    } else {
      for_each_row(axes + 1, num_axes - 1, source, target, visit);
    }
    source += axis.source_stride;
    target += axis.target_stride;
  }
}

PC_FORCE_INLINE void fetch(const char* p, int64_t bytes) {
  if (bytes > kFetchBytes) return;
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, 2);
}

template <Float From, Float To>
PC_FORCE_INLINE void convert_elements(const char* source, char* target, int64_t count) {
  for_each_vector<From>(source, count, [&](int64_t i, Vec v, int64_t part) { store_part<To>(target, i, v, part); });
}

template <Float From, Float To>
PC_FORCE_INLINE void stream_converted(LineWriter& writer, const char* source, char* target, int64_t count) {
  for (int64_t i = 0; i < count; i += kConvertElements) {
    const int64_t part = count - i < kConvertElements ? count - i : kConvertElements;
    char* room = writer.reserve(target + i * kSize<To>, part * kSize<To>);
    convert_elements<From, To>(source + i * kSize<From>, room, part);
  }
}

PC_FORCE_INLINE void stream_row(LineWriter& writer, const char* source, char* target, int64_t bytes) {
  if (bytes >= kDirectBytes || (reinterpret_cast<uintptr_t>(target) | static_cast<uintptr_t>(bytes)) % kLine == 0) {
    writer.finish();
    stream_bytes(target, source, bytes);
  } else {
    copy_bytes(writer.reserve(target, bytes), source, bytes);
  }
}

// copy(source, target, elements) moves one row.
template <typename Copy>
inline void move_pieces(const Move& move, const Run* runs, int64_t num_runs, Copy&& copy) {
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
    const int64_t row_bytes = row * move.source_itemsize;
    if (piece.source == nullptr) {
      MoveAxis still[8];  // no source, and so no step from it
      for (int i = 0; i < move.num_axes; ++i) still[i] = {axes[i].size, 0, axes[i].target_stride};
      auto clear = [&](const char*, char* target) {
        __builtin_memset(target, 0, static_cast<size_t>(row * move.target_itemsize));
      };
      for_each_row(still, move.num_axes, nullptr, piece.target, clear);
    } else if (next.source != nullptr) {
      const int64_t ahead = next.source - piece.source;
      auto visit = [&](const char* source, char* target) {
        fetch(source + ahead, row_bytes);
        copy(source, target, row);
      };
      for_each_row(axes, move.num_axes, piece.source, piece.target, visit);
    } else {
      auto visit = [&](const char* source, char* target) { copy(source, target, row); };
      for_each_row(axes, move.num_axes, piece.source, piece.target, visit);
    }
  }
}

// With a size known to the compiler, a short row is a few moves instead of a call.
template <int64_t kBytes>
inline void copy_short_rows(const Move& move, const Run* runs, int64_t num_runs) {
  move_pieces(move, runs, num_runs,
              [](const char* source, char* target, int64_t) { __builtin_memcpy(target, source, kBytes); });
}

inline void copy_rows(const Move& move, const Run* runs, int64_t num_runs) {
  if (move.varying != move.num_axes) {
    switch (move.row * move.source_itemsize) {
      case 1: return copy_short_rows<1>(move, runs, num_runs);
      case 2: return copy_short_rows<2>(move, runs, num_runs);
      case 4: return copy_short_rows<4>(move, runs, num_runs);
      case 8: return copy_short_rows<8>(move, runs, num_runs);
      case 64: return copy_short_rows<64>(move, runs, num_runs);
      case 128: return copy_short_rows<128>(move, runs, num_runs);
      case 256: return copy_short_rows<256>(move, runs, num_runs);
      default: break;
    }
  }
  const int64_t size = move.source_itemsize;
  move_pieces(move, runs, num_runs,
              [=](const char* source, char* target, int64_t count) { copy_bytes(target, source, count * size); });
}

inline void stream_rows(const Move& move, const Run* runs, int64_t num_runs) {
  LineWriter writer;
  const int64_t size = move.source_itemsize;
  move_pieces(move, runs, num_runs, [&](const char* source, char* target, int64_t count) {
    stream_row(writer, source, target, count * size);
  });
  writer.finish();
  finish_streams();
}

template <Float From, Float To>
inline void convert_rows(const Move& move, const Run* runs, int64_t num_runs) {
  if (!move.streams) {
    move_pieces(move, runs, num_runs, [](const char* source, char* target, int64_t count) {
      convert_elements<From, To>(source, target, count);
    });
    return;
  }
  LineWriter writer;
  move_pieces(move, runs, num_runs, [&](const char* source, char* target, int64_t count) {
    stream_converted<From, To>(writer, source, target, count);
  });
  writer.finish();
  finish_streams();
}

// The places of all runs must have been checked.
inline void move_runs(const Move& move, const Run* runs, int64_t num_runs) {
  if (!move.converts) {
    if (move.streams) {
      stream_rows(move, runs, num_runs);
    } else {
      copy_rows(move, runs, num_runs);
    }
    return;
  }
  with_float(move.from, [&]<Float From>() {
    with_float(move.to, [&]<Float To>() {
      if constexpr (From != To) convert_rows<From, To>(move, runs, num_runs);
    });
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
