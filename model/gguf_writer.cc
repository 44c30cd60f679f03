#include "model/gguf_writer.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "common/test_util.h"
#include "nlohmann/json.hpp"

namespace carrel::model {

using nlohmann::json;

std::string EncodeString(absl::string_view text) {
  return absl::StrCat(EncodeNumber(uint64_t{text.size()}), text);
}

std::string EncodeArray(uint32_t element_type, uint64_t count, absl::string_view elements) {
  return absl::StrCat(EncodeNumber(element_type), EncodeNumber(count), elements);
}

GgufWriter& GgufWriter::Raw(absl::string_view key, uint32_t type, absl::string_view encoded) {
  Drop(key);
  keys_.push_back({std::string(key), type, std::string(encoded)});
  return *this;
}

GgufWriter& GgufWriter::Drop(absl::string_view key) {
  std::erase_if(keys_, [&](const Key& k) { return k.name == key; });
  return *this;
}

GgufWriter& GgufWriter::U32(absl::string_view key, uint32_t value) {
  return Raw(key, static_cast<uint32_t>(GgufValueType::kU32), EncodeNumber(value));
}
GgufWriter& GgufWriter::U16(absl::string_view key, uint16_t value) {
  return Raw(key, static_cast<uint32_t>(GgufValueType::kU16), EncodeNumber(value));
}
GgufWriter& GgufWriter::F32(absl::string_view key, float value) {
  return Raw(key, static_cast<uint32_t>(GgufValueType::kF32), EncodeNumber(value));
}
GgufWriter& GgufWriter::Bool(absl::string_view key, bool value) {
  return Raw(key, static_cast<uint32_t>(GgufValueType::kBool), std::string(1, value ? 1 : 0));
}
GgufWriter& GgufWriter::String(absl::string_view key, absl::string_view value) {
  return Raw(key, static_cast<uint32_t>(GgufValueType::kString), EncodeString(value));
}

GgufWriter& GgufWriter::Strings(absl::string_view key, const std::vector<std::string>& values) {
  std::string elements;
  for (const std::string& value : values) elements += EncodeString(value);
  return Raw(key, static_cast<uint32_t>(GgufValueType::kArray),
             EncodeArray(static_cast<uint32_t>(GgufValueType::kString), values.size(), elements));
}

GgufWriter& GgufWriter::Ints(absl::string_view key, const std::vector<int32_t>& values) {
  std::string elements;
  for (const int32_t value : values) elements += EncodeNumber(value);
  return Raw(key, static_cast<uint32_t>(GgufValueType::kArray),
             EncodeArray(static_cast<uint32_t>(GgufValueType::kI32), values.size(), elements));
}

GgufWriter& GgufWriter::Floats(absl::string_view key, const std::vector<float>& values) {
  std::string elements;
  for (const float value : values) elements += EncodeNumber(value);
  return Raw(key, static_cast<uint32_t>(GgufValueType::kArray),
             EncodeArray(static_cast<uint32_t>(GgufValueType::kF32), values.size(), elements));
}

GgufWriter& GgufWriter::Tensor(absl::string_view name, uint32_t type, std::vector<int64_t> shape,
                               absl::string_view bytes) {
  tensors_.push_back({std::string(name), type, std::move(shape), std::string(bytes)});
  return *this;
}

GgufWriter& GgufWriter::DropTensor(absl::string_view name) {
  std::erase_if(tensors_, [&](const OneTensor& t) { return t.name == name; });
  return *this;
}

void GgufWriter::MoveTensors(int64_t count, GgufWriter& other) {
  const auto end = count < 0 ? tensors_.end() : tensors_.begin() + count;
  other.tensors_.insert(other.tensors_.end(), tensors_.begin(), end);
  tensors_.erase(tensors_.begin(), end);
}

std::string GgufWriter::Bytes() const {
  std::string out =
      absl::StrCat("GGUF", EncodeNumber(version),
                   EncodeNumber(static_cast<int64_t>(tensors_.size()) + extra_tensors),
                   EncodeNumber(static_cast<int64_t>(keys_.size()) + extra_keys));
  for (const Key& key : keys_) {
    absl::StrAppend(&out, EncodeString(key.name), EncodeNumber(key.type), key.encoded);
  }
  const size_t step = static_cast<size_t>(alignment);
  const auto pad = [step](std::string& text) {
    text.resize((text.size() + step - 1) / step * step, '\0');
  };
  std::string data;
  for (const OneTensor& tensor : tensors_) {
    absl::StrAppend(&out, EncodeString(tensor.name),
                    EncodeNumber(static_cast<uint32_t>(tensor.shape.size())));
    for (auto extent = tensor.shape.rbegin(); extent != tensor.shape.rend(); ++extent) {
      out += EncodeNumber(*extent);
    }
    absl::StrAppend(&out, EncodeNumber(tensor.type),
                    EncodeNumber(static_cast<int64_t>(data.size()) + offset_shift));
    data += tensor.bytes;
    pad(data);
  }
  if (!tensors_.empty()) pad(out);
  return out + data;
}

GgufWriter& PutBpeTokenizer(const json& tokenizer, const std::string& pre, GgufWriter& writer) {
  constexpr int32_t kNormal = 1, kControl = 3, kUserDefined = 4, kUnused = 5;
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  const auto put = [&](const std::string& token, size_t id, int32_t type) {
    if (id >= tokens.size()) {
      tokens.resize(id + 1);
      types.resize(id + 1, kUnused);
    }
    tokens[id] = token;
    types[id] = type;
  };
  for (const auto& [token, id] : tokenizer["model"]["vocab"].items()) put(token, id, kNormal);
  for (const json& token : tokenizer["added_tokens"]) {
    put(token["content"], token["id"], token["special"] ? kControl : kUserDefined);
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (types[i] == kUnused) tokens[i] = absl::StrCat("[PAD", i, "]");
  }
  std::vector<std::string> merges;
  for (const json& merge : tokenizer["model"]["merges"]) {
    merges.push_back(merge.is_string() ? merge.get<std::string>()
                                       : absl::StrCat(merge[0].get<std::string>(), " ",
                                                      merge[1].get<std::string>()));
  }
  writer.String("tokenizer.ggml.model", "gpt2").String("tokenizer.ggml.pre", pre);
  writer.Strings("tokenizer.ggml.tokens", tokens).Ints("tokenizer.ggml.token_type", types);
  return writer.Strings("tokenizer.ggml.merges", merges);
}

std::string Mutate(const std::string& whole, size_t header, std::mt19937_64& rng) {
  const auto below = [&](size_t n) { return static_cast<size_t>(rng() % n); };
  std::string bytes = whole;
  for (size_t change = 0; change <= below(3); ++change) {
    const size_t at = below(std::min(header, bytes.size() - 8));
    switch (below(5)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8));
        break;
      case 1:
        bytes[at] = static_cast<char>(rng());
        break;
      case 2: {  // a length, count or offset that is not
        const uint64_t value = uint64_t{1} << below(64);
        std::memcpy(&bytes[at], &value, sizeof(value));
        break;
      }
      case 3:
        bytes.erase(at, below(9));
        break;
      default:
        bytes.insert(at, below(9), static_cast<char>(rng()));
    }
  }
  return bytes;
}

std::string WriteGguf(const std::string& bytes, const std::string& name) {
  const std::string path = FreshTempDir() + "/" + name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

}  // namespace carrel::model
