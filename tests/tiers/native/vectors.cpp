// Pieces of memory of exact sizes through a socket pair, their sums, and copies to them.
#include "pagecore/tiers/handover/vectors.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <ctime>
#include <thread>

#include "pagecore/tiers/keys/xxh3.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::tiers;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t in_seconds(int64_t seconds) {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t{time.tv_sec} + seconds) * kSecond + time.tv_nsec;
}

// Cuts memory into pieces of random sizes, some of them empty.
std::vector<Piece> cut(Random& random, const Exact<uint8_t>& memory) {
  std::vector<Piece> pieces;
  size_t begin = 0;
  while (begin < memory.size()) {
    const size_t size = std::min(memory.size() - begin, static_cast<size_t>(random.below(300)));
    pieces.push_back({reinterpret_cast<uint64_t>(memory.data()) + begin, size});
    begin += size;
  }
  return pieces;
}

Exact<uint8_t> random_source(Random& random, size_t size) {
  Exact<uint8_t> bytes(size);
  for (uint8_t& each : bytes.span()) each = static_cast<uint8_t>(random.bits());
  return bytes;
}

}  // namespace

PC_TEST(streams_move_every_byte) {
  rounds(20, [](Random& random) {
    const Exact<uint8_t> source = random_source(random, static_cast<size_t>(random.between(1, 200'000)));
    const Exact<uint8_t> target(source.size());
    const auto sent = cut(random, source), received = cut(random, target);
    int sockets[2];
    PC_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
    uint64_t out = 0, in = 0;
    int status = 1;
    std::thread sender([&] { status = send_pieces(sockets[0], sent, in_seconds(60), out); });
    const int end = receive_pieces(sockets[1], received, in_seconds(60), in);
    sender.join();
    close(sockets[0]);
    close(sockets[1]);
    PC_CHECK(status == 0 && end == 0 && out == source.size() && in == source.size(), status, " ", end);
    PC_CHECK(std::memcmp(source.data(), target.data(), source.size()) == 0, "other bytes arrived");
  });
}

PC_TEST(sums_and_copies_do_not_depend_on_the_pieces) {
  rounds(100, [](Random& random) {
    const Exact<uint8_t> source = random_source(random, static_cast<size_t>(random.between(1, 3000)));
    const Exact<uint8_t> target(source.size());
    const auto pieces = cut(random, target);
    scatter_pieces(source.data(), pieces);
    const uint64_t seed = random.bits();
    const auto end = static_cast<int64_t>(pieces.size());
    uint64_t sum = 0;
    sum_units(pieces, {&end, 1}, {&seed, 1}, {&sum, 1});
    PC_CHECK(sum == xxh3_64(source.data(), source.size(), seed), source.size());
  });
}
