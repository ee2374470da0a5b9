#include "pagecore/tiers/keys/content_chain.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/tiers/keys/xxh3.hpp"

namespace pagecore::tiers {
namespace {

constexpr uint8_t kNoneCounted[4] = {};  // the count 0, of spans or of a namespace's bytes

class Message {
 public:
  Message(std::span<const uint8_t> header, size_t most) : bytes_(header.size() + most), header_(header.size()) {
    std::copy(header.begin(), header.end(), bytes_.begin());
    restart();
  }
  void restart() { size_ = header_; }
  void add(const void* part, size_t nbytes) {
    std::memcpy(bytes_.data() + size_, part, nbytes);
    size_ += nbytes;
  }
  void add(std::span<const uint8_t> part) { add(part.data(), part.size()); }
  [[nodiscard]] const uint8_t* data() const { return bytes_.data(); }
  [[nodiscard]] size_t size() const { return size_; }

 private:
  std::vector<uint8_t> bytes_;
  size_t header_, size_ = 0;
};

void check(int64_t block_size, const PackedSpans& spans) {
  PC_EXPECTS(block_size >= 1, ShapeError, "block_size is ", block_size, "; use 1 or more");
  PC_EXPECTS(spans.blocks.size() == spans.ends.size(), ShapeError, "spans of ", spans.blocks.size(), " blocks have ",
             spans.ends.size(), " ends; give one for each");
  int64_t block = -1, end = 0;
  for (size_t i = 0; i < spans.blocks.size(); ++i) {
    PC_EXPECTS(spans.blocks[i] > block && spans.ends[i] >= end, ShapeError, "spans must ascend by block");
    block = spans.blocks[i];
    end = spans.ends[i];
  }
  PC_EXPECTS(end <= static_cast<int64_t>(spans.bytes.size()), ShapeError, "spans end at byte ", end, " of ",
             spans.bytes.size());
}

}  // namespace

void hash_chain(const ChainStart& start, std::span<const int32_t> ids, int64_t block_size, const PackedSpans& spans,
                uint8_t* out) {
  check(block_size, spans);
  const auto block_bytes = static_cast<size_t>(block_size) * sizeof(int32_t);
  Message message(start.header,
                  kHashBytes + start.space.size() + sizeof(kNoneCounted) * 2 + spans.bytes.size() + block_bytes);
  const auto blocks = static_cast<int64_t>(ids.size()) / block_size;
  uint8_t parent[kHashBytes] = {};
  size_t next = 0, begin = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    message.restart();
    message.add(parent, sizeof(parent));
    message.add(block == 0 ? start.space : std::span<const uint8_t>(kNoneCounted));
    if (next < spans.blocks.size() && spans.blocks[next] == block) {
      const auto end = static_cast<size_t>(spans.ends[next++]);
      message.add(spans.bytes.subspan(begin, end - begin));
      begin = end;
    } else {
      message.add(kNoneCounted, sizeof(kNoneCounted));
    }
    message.add(ids.data() + block * block_size, block_bytes);
    xxh3_128(message.data(), message.size(), start.secret, parent);
    std::memcpy(out + static_cast<size_t>(block) * kHashBytes, parent, sizeof(parent));
  }
}

}  // namespace pagecore::tiers
