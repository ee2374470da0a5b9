// Latent attention of every format on every instruction set of the machine, against float64, with lists of slots and
// with sequences. Arrays have exactly the bytes that a call may touch.
#include <algorithm>
#include <memory>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/latent/latent.hpp"
#include "tests/ops/native/floats.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

class LatentCase {
 public:
  explicit LatentCase(Random& random) : random_(random) {
    format_ = random.pick({LatentFormat::Plain, LatentFormat::E4M3, LatentFormat::Fp8DsMla, LatentFormat::Nvfp4DsMla});
    type_ = format_ == LatentFormat::Plain ? random.pick(kFloats) : Float::BF16;
    query_type_ = random.pick(kFloats);
    latent_ = is_packed(format_) ? kPackedLatentDim : random.pick({int64_t{512}, random.between(1, 70)});
    rope_ = is_packed(format_) ? kPackedRopeDim : random.pick({int64_t{64}, random.between(1, 40)});
    heads_ = random.pick({int64_t{1}, int64_t{3}, int64_t{16}, int64_t{33}});
    length_ = random.between(1, 150);
    block_size_ = random.pick({int64_t{1}, int64_t{7}, int64_t{16}, int64_t{64}});
    sparse_ = random.one_in(2);
    make_cache();
    make_call();
  }

  void runs_as_defined() {
    in_new_thread([&] { latent_attention(args_, nullptr, 2); });
    for (int64_t head = 0; head < heads_; ++head) compare(head);
  }

 private:
  [[nodiscard]] int64_t row_bytes() const {
    LatentCache cache;
    cache.format = format_;
    cache.type = type_;
    cache.latent_dim = latent_;
    cache.rope_dim = rope_;
    return latent_token_bytes(cache);
  }

  void make_cache() {
    const int64_t blocks = (length_ + block_size_ - 1) / block_size_ + 1, bytes = row_bytes();
    memory_.reset(
        static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>((blocks * block_size_ * bytes + 63) / 64 * 64))));
    std::memset(memory_.get(), 0x5a, static_cast<size_t>(blocks * block_size_ * bytes));
    LatentCache& cache = args_.cache;
    cache.latent = memory_.get();
    cache.token_stride = cache.rope_token_stride = bytes;
    cache.block_stride = cache.rope_block_stride = bytes * block_size_;
    cache.type = type_;
    cache.format = format_;
    cache.num_blocks = blocks;
    cache.block_size = block_size_;
    cache.latent_dim = latent_;
    cache.rope_dim = rope_;
    cache.rope = is_packed(format_) ? cache.latent : cache.latent + latent_ * latent_size(cache);
    for (int64_t i = 0; i < blocks; ++i) table_.push_back(static_cast<int32_t>(i));
    random_.shuffle(table_);
    std::vector<float> numbers(static_cast<size_t>(length_ * (latent_ + rope_)));
    for (float& number : numbers) number = static_cast<float>(random_.normal());
    for (int64_t i = 0; i < length_; ++i)
      slots_.push_back(table_[static_cast<size_t>(i / block_size_)] * static_cast<int32_t>(block_size_) +
                       static_cast<int32_t>(i % block_size_));
    write(numbers);
  }

  void write(const std::vector<float>& numbers) {
    const int64_t width = latent_ + rope_;
    if (format_ == LatentFormat::Plain) {
      for (int64_t i = 0; i < length_; ++i) {
        const int64_t slot = slots_[static_cast<size_t>(i)];
        for (int64_t d = 0; d < width; ++d)
          narrow(type_, numbers[static_cast<size_t>(i * width + d)],
                 memory_.get() + slot * row_bytes() + d * size_of(type_));
      }
      return;
    }
    LatentWriteArgs args;
    args.cache = args_.cache;
    auto* data = reinterpret_cast<char*>(const_cast<float*>(numbers.data()));
    args.latent = {data, Float::F32, length_, 1, latent_, 4 * width, 4 * width};
    args.rope = {data + 4 * latent_, Float::F32, length_, 1, rope_, 4 * width, 4 * width};
    args.slots = {reinterpret_cast<const char*>(slots_.data()), length_, 4, false};
    write_latent(args, 2);
  }

  void make_call() {
    const int64_t size = size_of(query_type_);
    query_.resize(static_cast<size_t>(heads_ * latent_ * size));
    query_rope_.resize(static_cast<size_t>(heads_ * rope_ * size));
    for (int64_t i = 0; i < heads_ * latent_; ++i) narrow(query_type_, random_.normal(), query_.data() + i * size);
    for (int64_t i = 0; i < heads_ * rope_; ++i) narrow(query_type_, random_.normal(), query_rope_.data() + i * size);
    out_.assign(query_.size(), '\x7f');
    lse_.assign(static_cast<size_t>(heads_), NAN);
    AttentionArgs& call = args_.call;
    call.query = {query_.data(), query_type_, 1, heads_, latent_, heads_ * latent_ * size, latent_ * size};
    args_.query_rope = {query_rope_.data(), query_type_, 1, heads_, rope_, heads_ * rope_ * size, rope_ * size};
    call.out = call.query;
    call.out.data = out_.data();
    call.lse = {reinterpret_cast<char*>(lse_.data()), 1, 4 * heads_, 4};
    call.scale = 0.08;
    call.key.num_heads = 1;
    call.key.num_blocks = args_.cache.num_blocks;
    call.key.block_size = block_size_;
    call.value = call.key;
    call.value.dim = latent_;
    args_.sparse = sparse_;
    if (sparse_) {
      random_.shuffle(slots_);
      for (int32_t& slot : slots_) slot = random_.one_in(4) ? -1 : slot;
      call.key.block_size = 1;
      call.causal = false;
    }
    const std::vector<int32_t>& list = sparse_ ? slots_ : table_;
    call.table = {reinterpret_cast<const char*>(list.data()), 1, std::ssize(list), 4 * std::ssize(list), false};
    count_ = static_cast<int32_t>(length_);
    call.seq_lens = {reinterpret_cast<const char*>(&count_), 1, 4, false};
  }

  void compare(int64_t head) {
    const int64_t size = size_of(query_type_);
    std::vector<double> scores;
    std::vector<std::vector<float>> rows;
    for (const int32_t slot : slots_) {
      if (slot < 0) continue;
      std::vector<float> row(static_cast<size_t>(latent_ + rope_));
      kernels().latent->read_row(args_.cache, slot / block_size_, slot % block_size_, 1.0f,
                                 reinterpret_cast<char*>(row.data()), Float::F32);
      double score = 0.0;
      for (int64_t d = 0; d < latent_ + rope_; ++d) {
        const char* number = d < latent_ ? query_.data() + (head * latent_ + d) * size
                                         : query_rope_.data() + (head * rope_ + d - latent_) * size;
        score += widen(query_type_, number) * static_cast<double>(row[static_cast<size_t>(d)]);
      }
      scores.push_back(score * args_.call.scale);
      rows.push_back(row);
    }
    const float lse = lse_[static_cast<size_t>(head)];
    if (scores.empty()) {
      PC_CHECK(lse == -INFINITY, isa(), ": lse of nothing is ", lse);
      return;
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double total = 0.0;
    for (const double score : scores) total += std::exp(score - top);
    PC_CHECK(std::fabs(lse - (top + std::log(total))) <= 2e-3, isa(), ": lse of head ", head, " is ", lse);
    const double bound = query_type_ == Float::F32 ? 1e-5 : query_type_ == Float::F16 ? 3e-3 : 2e-2;
    for (int64_t d = 0; d < latent_; ++d) {
      double expected = 0.0, scale = 0.0;
      for (size_t i = 0; i < scores.size(); ++i) {
        const double value = std::exp(scores[i] - top) / total * static_cast<double>(rows[i][static_cast<size_t>(d)]);
        expected += value;
        scale += std::fabs(value);
      }
      const double found = widen(query_type_, out_.data() + (head * latent_ + d) * size);
      PC_CHECK(std::fabs(found - expected) <= bound * scale + 1e-6, isa(), ": head ", head, ", number ", d, " is ",
               found, " for ", expected);
    }
  }

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  Random& random_;
  LatentFormat format_;
  Float type_, query_type_;
  int64_t latent_, rope_, heads_, length_, block_size_;
  bool sparse_;
  int32_t count_ = 0;
  std::unique_ptr<char, Free> memory_;
  std::vector<int32_t> table_, slots_;
  std::vector<char> query_, query_rope_, out_;
  std::vector<float> lse_;
  LatentArgs args_;
};

}  // namespace

PC_TEST(latent_attention_is_as_defined_on_every_instruction_set) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(12, [](Random& random) { LatentCase(random).runs_as_defined(); });
  }
  set_isa("");
}
