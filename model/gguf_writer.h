// What: writes GGUF files: whole ones, and broken ones for what must be refused. Tests only.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/layer/dequantize/dequantize.h"
#include "model/gguf.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel::model {

class GgufWriter {
 public:
  GgufWriter& U32(absl::string_view key, uint32_t value);
  GgufWriter& U16(absl::string_view key, uint16_t value);
  GgufWriter& F32(absl::string_view key, float value);
  GgufWriter& Bool(absl::string_view key, bool value);
  GgufWriter& String(absl::string_view key, absl::string_view value);
  GgufWriter& Strings(absl::string_view key, const std::vector<std::string>& values);
  GgufWriter& Ints(absl::string_view key, const std::vector<int32_t>& values);
  GgufWriter& Floats(absl::string_view key, const std::vector<float>& values);
  // The value as it will stand in the file, behind its type.
  GgufWriter& Raw(absl::string_view key, uint32_t type, absl::string_view encoded);
  GgufWriter& Drop(absl::string_view key);

  // `type` may be any number, `bytes` of any size. The shape is rows first; the file has it
  // reversed.
  GgufWriter& Tensor(absl::string_view name, uint32_t type, std::vector<int64_t> shape,
                     absl::string_view bytes);
  GgufWriter& Tensor(absl::string_view name, kernels::GgufType type, std::vector<int64_t> shape,
                     absl::string_view bytes) {
    return Tensor(name, static_cast<uint32_t>(type), std::move(shape), bytes);
  }
  GgufWriter& DropTensor(absl::string_view name);
  // The first `count` of the tensors, or all if it is negative, leave this file for another.
  void MoveTensors(int64_t count, GgufWriter& other);

  // Parts of the header that a test may change before Bytes().
  uint32_t version = 3;
  int64_t alignment = 32;  // of the data; the key general.alignment is the caller's
  int64_t extra_keys = 0, extra_tensors = 0;  // added to the counts alone
  int64_t offset_shift = 0;                   // added to every tensor's offset

  std::string Bytes() const;

 private:
  struct Key {
    std::string name;
    uint32_t type;
    std::string encoded;
  };
  struct OneTensor {
    std::string name;
    uint32_t type;
    std::vector<int64_t> shape;
    std::string bytes;
  };
  std::vector<Key> keys_;
  std::vector<OneTensor> tensors_;
};

std::string EncodeString(absl::string_view text);
template <typename T>
std::string EncodeNumber(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
std::string EncodeArray(uint32_t element_type, uint64_t count, absl::string_view elements);

// Adds a byte-level tokenizer.json as a converter writes it, under a tokenizer.ggml.pre.
GgufWriter& PutBpeTokenizer(const nlohmann::json& tokenizer, const std::string& pre,
                            GgufWriter& writer);

// Changes one to three places before `header`: bits, bytes, lengths and counts, insertions,
// deletions.
std::string Mutate(const std::string& bytes, size_t header, std::mt19937_64& rng);

// Writes the file into a fresh folder and returns its path.
std::string WriteGguf(const std::string& bytes, const std::string& name = "model.gguf");

}  // namespace carrel::model
