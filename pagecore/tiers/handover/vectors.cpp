#include "pagecore/tiers/handover/vectors.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "pagecore/tiers/keys/xxh3.hpp"

namespace pagecore::tiers {
namespace {

static_assert(sizeof(Piece) == sizeof(iovec));

constexpr size_t kMaxPieces = 512;  // of a system call; the limit of Linux is 1,024

int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Waits until the socket is ready; returns a StreamEnd or an errno.
int wait_for(int descriptor, short events, int64_t deadline) {
  while (true) {
    const int64_t left = deadline - now();
    if (left <= 0) return static_cast<int>(StreamEnd::TimedOut);
    pollfd waited{descriptor, events, 0};
    const int ready = poll(&waited, 1, static_cast<int>(std::min<int64_t>(left / 1'000'000 + 1, 1'000)));
    if (ready > 0) return static_cast<int>(StreamEnd::Done);
    if (ready < 0 && errno != EINTR) return errno;
  }
}

// The pieces that are left, of which the first may be cut.
class Rest {
 public:
  explicit Rest(std::span<const Piece> pieces) : pieces_(pieces) {}

  // Fills `vectors` with the next pieces; returns their number, 0 at the end.
  size_t next(iovec* vectors) {
    while (first_ < pieces_.size() && pieces_[first_].nbytes == offset_) step();
    const size_t count = std::min(kMaxPieces, pieces_.size() - first_);
    for (size_t i = 0; i < count; ++i) {
      const Piece& piece = pieces_[first_ + i];
      const uint64_t skipped = i == 0 ? offset_ : 0;
      vectors[i] = {reinterpret_cast<void*>(piece.address + skipped), static_cast<size_t>(piece.nbytes - skipped)};
    }
    return count;
  }

  void advance(uint64_t nbytes) {
    while (nbytes > 0) {
      const uint64_t taken = std::min(nbytes, pieces_[first_].nbytes - offset_);
      offset_ += taken;
      nbytes -= taken;
      if (offset_ == pieces_[first_].nbytes) step();
    }
  }

 private:
  void step() {
    ++first_;
    offset_ = 0;
  }

  std::span<const Piece> pieces_;
  size_t first_ = 0;
  uint64_t offset_ = 0;
};

template <typename Call>
int move_all(int descriptor, std::span<const Piece> pieces, short events, int64_t deadline, uint64_t& moved,
             Call call) {
  Rest rest(pieces);
  iovec vectors[kMaxPieces];
  moved = 0;
  while (const size_t count = rest.next(vectors)) {
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = count;
    const ssize_t taken = call(descriptor, &message);
    if (taken > 0) {
      moved += static_cast<uint64_t>(taken);
      rest.advance(static_cast<uint64_t>(taken));
      if (now() > deadline) return static_cast<int>(StreamEnd::TimedOut);
      continue;
    }
    if (taken == 0) return static_cast<int>(StreamEnd::Closed);
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) return static_cast<int>(StreamEnd::Closed);
    if (errno != EAGAIN && errno != EWOULDBLOCK) return errno;
    const int status = wait_for(descriptor, events, deadline);
    if (status != 0) return status;
  }
  return static_cast<int>(StreamEnd::Done);
}

uint64_t sum_of(std::span<const Piece> pieces, uint64_t seed) {
  if (pieces.size() == 1) {
    return xxh3_64(reinterpret_cast<const void*>(pieces[0].address), pieces[0].nbytes, seed);
  }
  XXH3_state_t state;
  XXH3_INITSTATE(&state);  // a reset with a seed reads the seed before it
  XXH3_64bits_reset_withSeed(&state, seed);
  for (const Piece& piece : pieces) {
    XXH3_64bits_update(&state, reinterpret_cast<const void*>(piece.address), piece.nbytes);
  }
  return XXH3_64bits_digest(&state);
}

}  // namespace

int send_pieces(int descriptor, std::span<const Piece> pieces, int64_t deadline, uint64_t& moved) {
  return move_all(descriptor, pieces, POLLOUT, deadline, moved, [](int socket, const msghdr* message) {
    return sendmsg(socket, message, MSG_DONTWAIT | MSG_NOSIGNAL);
  });
}

int receive_pieces(int descriptor, std::span<const Piece> pieces, int64_t deadline, uint64_t& moved) {
  return move_all(descriptor, pieces, POLLIN, deadline, moved,
                  [](int socket, msghdr* message) { return recvmsg(socket, message, MSG_DONTWAIT); });
}

void sum_units(std::span<const Piece> pieces, std::span<const int64_t> ends, std::span<const uint64_t> seeds,
               std::span<uint64_t> out) {
  size_t first = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const auto end = static_cast<size_t>(ends[i]);
    out[i] = sum_of(pieces.subspan(first, end - first), seeds[i]);
    first = end;
  }
}

void scatter_pieces(const void* source, std::span<const Piece> pieces) {
  const auto* from = static_cast<const std::byte*>(source);
  for (const Piece& piece : pieces) {
    std::memcpy(reinterpret_cast<void*>(piece.address), from, piece.nbytes);
    from += piece.nbytes;
  }
}

}  // namespace pagecore::tiers
