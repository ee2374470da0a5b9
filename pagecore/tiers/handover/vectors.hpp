// Pieces of memory that travel over a stream socket, and sums of their bytes.
//
// A piece is an address and a number of bytes, in the layout of `iovec`. The bytes of a list of pieces are those of its
// pieces, one after the other; where the pieces are cut makes no difference to the receiver or to a sum.
// Threads: no state; the caller owns memory and descriptor.
#pragma once

#include <cstdint>
#include <span>

namespace pagecore::tiers {

struct Piece {
  uint64_t address;
  uint64_t nbytes;
};

enum class StreamEnd : int {
  Done = 0,
  TimedOut = -1,  // the deadline passed
  Closed = -2,    // the peer closed the connection
};

// Moves all bytes of `pieces` through a socket, many pieces a system call, and polls while the socket is not ready.
// `deadline` is in nanoseconds of CLOCK_MONOTONIC. Returns a StreamEnd, or the positive errno; `moved` counts the
// bytes.
int send_pieces(int descriptor, std::span<const Piece> pieces, int64_t deadline, uint64_t& moved);
int receive_pieces(int descriptor, std::span<const Piece> pieces, int64_t deadline, uint64_t& moved);

// Writes the XXH3 (64 bits) of each unit: pieces [ends[i - 1], ends[i]), seeded by seeds[i].
void sum_units(std::span<const Piece> pieces, std::span<const int64_t> ends, std::span<const uint64_t> seeds,
               std::span<uint64_t> out);

// Copies the bytes at `source`, one after the other, to the pieces.
void scatter_pieces(const void* source, std::span<const Piece> pieces);

}  // namespace pagecore::tiers
