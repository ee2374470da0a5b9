// Custom calls, called through XLA's C interface. Arrays have exact allocations, so that sanitizers find every access
// out of bounds.
#include "pagecore/interop/jax/handlers.hpp"

#include <cmath>
#include <map>
#include <optional>
#include <vector>

#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::test;

// The error that create_error() makes; opaque to handlers.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string text;
};

namespace {

using Shape = std::vector<int64_t>;

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->errc, args->message}; }

// A dense array in an exact allocation.
template <typename T>
class Operand {
 public:
  Operand(XLA_FFI_DataType type, Shape shape) : shape_(std::move(shape)), values_(count()) {
    buffer_ = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, values_.data(), std::ssize(shape_), shape_.data()};
  }
  template <typename Make>
  Operand(XLA_FFI_DataType type, Shape shape, Make&& make) : Operand(type, std::move(shape)) {
    for (size_t i = 0; i < count(); ++i) values_[i] = static_cast<T>(make());
  }

  [[nodiscard]] XLA_FFI_Buffer* buffer() { return &buffer_; }
  [[nodiscard]] T& operator[](int64_t i) { return values_[static_cast<size_t>(i)]; }
  [[nodiscard]] std::vector<T> copy() { return {values_.data(), values_.data() + count()}; }
  void set(const std::vector<T>& values) {
    for (size_t i = 0; i < count(); ++i) values_[i] = values[i];
  }

 private:
  [[nodiscard]] size_t count() const {
    int64_t product = 1;
    for (const int64_t length : shape_) product *= length;
    return static_cast<size_t>(product);
  }

  Shape shape_;
  Exact<T> values_;
  XLA_FFI_Buffer buffer_;
};

using Floats = Operand<float>;
using Ids = Operand<int32_t>;

Floats normal(Random& random, Shape shape) {
  return {XLA_FFI_DataType_F32, std::move(shape), [&] { return random.normal(); }};
}

// A call and its attributes, sorted by name as by XLA.
struct Call {
  std::vector<XLA_FFI_Buffer*> arguments;
  std::vector<XLA_FFI_Buffer*> results;
  std::map<std::string, int64_t> integers = {
      {"given", 0}, {"heads_first", 0}, {"key_format", 0}, {"value_format", 0}, {"four_over_six", 0}};
  std::map<std::string, double> numbers = {};

  void give(xla::Optional option, XLA_FFI_Buffer* argument) {
    arguments.push_back(argument);
    integers["given"] |= int64_t{1} << option;
  }

  // Returns the error of the handler, if any.
  std::optional<XLA_FFI_Error> operator()(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*) noexcept) {
    XLA_FFI_Api api{};
    api.XLA_FFI_Error_Create = create_error;
    std::vector<XLA_FFI_ArgType> argument_types(arguments.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_Scalar> scalars;
    std::vector<XLA_FFI_ByteSpan> names;
    const auto list = [&](auto& attributes, XLA_FFI_DataType type) {
      for (auto& [name, value] : attributes) {
        names.push_back({name.data(), name.size()});
        scalars.push_back({type, &value});
      }
    };
    list(integers, XLA_FFI_DataType_S64);
    list(numbers, XLA_FFI_DataType_F64);
    std::vector<XLA_FFI_AttrType> types(scalars.size(), XLA_FFI_AttrType_SCALAR);
    std::vector<XLA_FFI_ByteSpan*> name_pointers;
    std::vector<void*> scalar_pointers;
    for (size_t i = 0; i < scalars.size(); ++i) {
      name_pointers.push_back(&names[i]);
      scalar_pointers.push_back(&scalars[i]);
    }
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, std::ssize(arguments), argument_types.data(),
                  reinterpret_cast<void**>(arguments.data())};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, std::ssize(results), result_types.data(),
                  reinterpret_cast<void**>(results.data())};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, std::ssize(scalars), types.data(), name_pointers.data(),
                   scalar_pointers.data()};
    XLA_FFI_Error* error = handler(&frame);
    if (error == nullptr) return std::nullopt;
    XLA_FFI_Error copy = *error;
    delete error;
    return copy;
  }
};

std::atomic<int64_t> num_threads{2};

const bool connected = [] {
  xla::host = {&cpu::host_calls(), &num_threads};
  return true;
}();

// Shape of caches: stacked layers or one layer, heads first or tokens first.
struct Geometry {
  int64_t layers, layer, blocks, block_size, heads, dim;
  bool heads_first, stacked;

  explicit Geometry(Random& random)
      : layers(random.between(1, 3)),
        layer(random.below(layers)),
        blocks(random.between(2, 6)),
        block_size(random.between(1, 9)),
        heads(random.between(1, 3)),
        dim(random.pick({int64_t{8}, int64_t{16}, random.between(1, 40)})),
        heads_first(random.one_in(2)),
        stacked(layers > 1 || random.one_in(2)) {}

  [[nodiscard]] Shape shape() const {
    Shape axes = heads_first ? Shape{blocks, heads, block_size, dim} : Shape{blocks, block_size, heads, dim};
    if (stacked) axes.insert(axes.begin(), layers);
    return axes;
  }
  // Index of an element of the layer.
  [[nodiscard]] int64_t at(int64_t slot, int64_t head, int64_t d) const {
    const int64_t block = slot / block_size, token = slot % block_size;
    const int64_t inner = heads_first ? head * block_size + token : token * heads + head;
    return ((layer * blocks + block) * block_size * heads + inner) * dim + d;
  }
  [[nodiscard]] int64_t slots() const { return blocks * block_size; }
};

}  // namespace

PC_TEST(a_custom_call_writes_to_the_slots) {
  rounds(300, [](Random& random) {
    const Geometry g(random);
    const int64_t tokens = random.between(0, 12);
    Floats key = normal(random, {tokens, g.heads, g.dim}), value = normal(random, {tokens, g.heads, g.dim});
    Floats keys = normal(random, g.shape()), values = normal(random, g.shape());
    Floats other_keys(XLA_FFI_DataType_F32, g.shape()), other_values(XLA_FFI_DataType_F32, g.shape());
    Ids slots(XLA_FFI_DataType_S32, {tokens}, [&] { return random.between(-1, g.slots() - 1); });
    Ids layer(XLA_FFI_DataType_S32, {}, [&] { return g.layer; });
    const bool in_place = random.one_in(2);
    Floats& key_result = in_place ? keys : other_keys;
    Floats& value_result = in_place ? values : other_values;
    std::vector<float> expected = keys.copy();
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; slots[t] >= 0 && i < g.heads * g.dim; ++i)
        expected[static_cast<size_t>(g.at(slots[t], i / g.dim, i % g.dim))] = key[t * g.heads * g.dim + i];
    }
    Call call{{key.buffer(), value.buffer(), keys.buffer(), values.buffer(), slots.buffer()},
              {key_result.buffer(), value_result.buffer()}};
    call.integers["heads_first"] = g.heads_first;
    if (g.stacked) call.give(xla::kLayer, layer.buffer());
    Operand<uint32_t> recorded(XLA_FFI_DataType_U32, {4});
    if (in_place) {
      Call addresses{{keys.buffer(), values.buffer()}, {recorded.buffer()}};
      PC_CHECK(!addresses(xla::addresses), "refused");
      call.give(xla::kAddresses, recorded.buffer());
    }
    const auto refused = call(xla::write_kv);
    PC_CHECK(!refused, refused->text);
    PC_CHECK(key_result.copy() == expected, "other bytes");
  });
}

PC_TEST(a_custom_call_attends_to_the_cached_keys) {
  rounds(300, [](Random& random) {
    const Geometry g(random);
    const int64_t length = random.between(0, g.slots() - g.block_size), group = random.between(1, 3);
    Floats query = normal(random, {1, g.heads * group, g.dim}), out(XLA_FFI_DataType_F32, {1, g.heads * group, g.dim});
    Floats keys = normal(random, g.shape()), values = normal(random, g.shape());
    Floats lse(XLA_FFI_DataType_F32, {1, g.heads * group});
    Ids table(XLA_FFI_DataType_S32, {1, g.blocks});
    for (int64_t i = 0; i < g.blocks; ++i) table[i] = static_cast<int32_t>((i + 1) % g.blocks);
    Ids lens(XLA_FFI_DataType_S32, {1}, [&] { return length; });
    Ids layer(XLA_FFI_DataType_S32, {}, [&] { return g.layer; });
    Floats scales(XLA_FFI_DataType_F32, {g.heads}, [&] { return 0.5; });
    Operand<bool> mask(XLA_FFI_DataType_PRED, {length}, [&] { return !random.one_in(4); });
    Call call{{query.buffer(), keys.buffer(), values.buffer(), table.buffer(), lens.buffer()},
              {out.buffer(), lse.buffer()}};
    call.integers.insert({{"causal", 1}, {"window_left", -1}, {"window_right", -1}, {"sink_tokens", 0}});
    call.integers["heads_first"] = g.heads_first;
    call.numbers = {{"scale", 0.3}, {"softcap", 0.0}};
    if (g.stacked) call.give(xla::kLayer, layer.buffer());
    call.give(xla::kMask, mask.buffer());
    call.give(xla::kKeyScale, scales.buffer());
    const auto refused = call(xla::paged_attention);
    PC_CHECK(!refused, refused->text);
    for (int64_t head = 0; head < g.heads * group; ++head) {
      double sum = 0.0, first = 0.0;
      for (int64_t j = 0; j < length; ++j) {
        if (!mask[j]) continue;
        const int64_t slot = table[j / g.block_size] * g.block_size + j % g.block_size;
        double score = 0.0;
        for (int64_t d = 0; d < g.dim; ++d)
          score += 0.3 * 0.5 * query[head * g.dim + d] * keys[g.at(slot, head / group, d)];
        sum += std::exp(score);
        first += std::exp(score) * values[g.at(slot, head / group, 0)];
      }
      const double expected = sum > 0.0 ? first / sum : 0.0;
      PC_CHECK(std::abs(out[head * g.dim] - expected) < 1e-4, out[head * g.dim], " instead of ", expected);
      PC_CHECK(sum == 0.0 ? lse[head] == -INFINITY : std::abs(lse[head] - std::log(sum)) < 1e-4, lse[head]);
    }
  });
}

PC_TEST(a_custom_call_fails_by_name_and_writes_nothing) {
  rounds(100, [](Random& random) {
    const Geometry g(random);
    Floats rows = normal(random, {1, g.heads, g.dim}), keys = normal(random, g.shape()),
           values = normal(random, g.shape());
    const int64_t fault = random.below(g.stacked ? 4 : 3);
    Ids slot(XLA_FFI_DataType_S32, {1}, [&] { return fault == 0 ? g.slots() : 0; });
    Ids layer(XLA_FFI_DataType_S32, {}, [&] { return fault == 3 ? random.pick({int64_t{-1}, g.layers}) : 0; });
    Floats scales(XLA_FFI_DataType_F32, {g.heads}, [&] { return fault == 1 ? 0.0 : 1.0; });
    Operand<uint32_t> recorded(XLA_FFI_DataType_U32, {4}, [] { return 0; });
    const std::vector<float> before = keys.copy();
    Call call{{rows.buffer(), rows.buffer(), keys.buffer(), values.buffer(), slot.buffer()},
              {keys.buffer(), values.buffer()}};
    call.integers["heads_first"] = g.heads_first;
    if (g.stacked) call.give(xla::kLayer, layer.buffer());
    call.give(xla::kKeyScale, scales.buffer());
    if (fault == 2) call.give(xla::kAddresses, recorded.buffer());
    const char* const names[] = {"InvalidBlock: ", "UnsupportedOption: ", "UnsupportedOption: ", "ShapeError: "};
    const auto refused = call(xla::write_kv);
    PC_CHECK(refused && refused->text.starts_with(names[fault]), refused ? refused->text : "not refused");
    PC_CHECK(refused->code != XLA_FFI_Error_Code_OK, refused->text);
    PC_CHECK(keys.copy() == before, "it was written");
  });
}

PC_TEST(a_call_with_other_arguments_is_an_internal_error) {
  rounds(1, [](Random& random) {
    Floats rows = normal(random, {1, 1, 8});
    PC_CHECK(Call{}(xla::write_kv)->code == XLA_FFI_Error_Code_INTERNAL, "not internal");
    Call wide{{rows.buffer(), rows.buffer(), rows.buffer(), rows.buffer(), rows.buffer()}, {}};
    PC_CHECK(wide(xla::write_kv)->code == XLA_FFI_Error_Code_INTERNAL, "not internal");
    wide.integers.clear();
    PC_CHECK(wide(xla::paged_attention)->text.starts_with("PagecoreError: "), "another error");
  });
}

PC_TEST(an_error_without_memory_is_an_error_of_the_call) {
  rounds(1, [](Random&) {
    const auto handler = [](XLA_FFI_CallFrame* frame) noexcept {
      return xla::serve(frame, [](xla::CallFrame&, cpu::Failure&) -> bool { throw std::bad_alloc(); });
    };
    const auto error = Call{}(handler);
    PC_CHECK(error && error->code == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "another error");
    PC_CHECK(error->text.starts_with("NotEnoughMemory: "), error->text);
  });
}

PC_TEST(a_long_error_is_cut) {
  rounds(1, [](Random&) {
    const auto handler = [](XLA_FFI_CallFrame* frame) noexcept {
      return xla::serve(frame, [](xla::CallFrame&, cpu::Failure&) -> bool {
        throw Error(ErrorKind::ShapeError, std::string(5000, 'x'));
      });
    };
    const auto error = Call{}(handler);
    PC_CHECK(error && error->text == "ShapeError: " + std::string(1023, 'x'), "another error");
  });
}

PC_TEST(an_error_is_cut_between_characters) {
  for (const size_t before : {0, 1, 2, 3}) {
    const size_t characters = (1023 - before) / 3;
    std::string text(before, 'x'), kept = text;
    for (size_t i = 0; i < 1000; ++i) text += "\u20ac";  // the euro sign has 3 bytes
    for (size_t i = 0; i < characters; ++i) kept += "\u20ac";
    cpu::Failure failure;
    failure.set(ErrorKind::ShapeError, text);
    PC_CHECK(failure.message == kept, "cut to ", std::string_view(failure.message).size(), " bytes");
    failure.set(ErrorKind::ShapeError, kept);
    PC_CHECK(failure.message == kept, "a text that fits is cut");
  }
}

PC_TEST(handlers_report_their_version) {
  rounds(1, [](Random&) {
    for (auto* handler : {xla::paged_attention, xla::write_kv, xla::addresses}) {
      XLA_FFI_Metadata reported{};
      XLA_FFI_Metadata_Extension query{{sizeof query, XLA_FFI_Extension_Metadata, nullptr}, &reported};
      XLA_FFI_CallFrame frame{};
      frame.extension_start = &query.extension_base;
      PC_CHECK(handler(&frame) == nullptr, "an error");
      PC_CHECK(reported.api_version.major_version == 0 && reported.api_version.minor_version == 3, "another version");
    }
  });
}

// Calls large enough to use the thread pool, which serves one call at a time.
PC_TEST(several_threads_call_at_once) {
  rounds(4, [](Random& random) {
    const std::vector<uint64_t> seeds = random.seeds(3);
    in_threads(3, [&](int thread) {
      Random own(seeds[static_cast<size_t>(thread)]);
      const int64_t tokens = 640, blocks = 40, block_size = 16, dim = 512;
      float next = 0.0f;
      Floats rows(XLA_FFI_DataType_F32, {tokens, 1, dim}, [&] { return next++; });
      Floats keys(XLA_FFI_DataType_F32, {blocks, block_size, 1, dim});
      Floats values(XLA_FFI_DataType_F32, {blocks, block_size, 1, dim});
      for (int repeat = 0; repeat < 5; ++repeat) {
        if (thread == 0) num_threads.store(own.between(1, 3), std::memory_order_relaxed);
        std::vector<int32_t> slots(tokens);
        for (int32_t i = 0; i < tokens; ++i) slots[static_cast<size_t>(i)] = i;
        own.shuffle(slots);
        Ids mapping(XLA_FFI_DataType_S32, {tokens});
        mapping.set(slots);
        Call call{{rows.buffer(), rows.buffer(), keys.buffer(), values.buffer(), mapping.buffer()},
                  {keys.buffer(), values.buffer()}};
        PC_CHECK(!call(xla::write_kv), "refused");
        for (int64_t i = 0; i < tokens; ++i) {
          const int64_t at = slots[static_cast<size_t>(i)] * dim;
          PC_CHECK(keys[at] == rows[i * dim] && values[at + dim - 1] == rows[(i + 1) * dim - 1], "token ", i);
        }
      }
    });
  });
}
