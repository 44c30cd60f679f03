#include "model/tokenizer/sentencepiece_spec.h"

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace carrel::model {
namespace {

struct Field {
  uint64_t number = 0;
  uint64_t varint = 0;      // wire type 0
  absl::string_view bytes;  // wire type 2
};

class WireReader {
 public:
  explicit WireReader(absl::string_view message) : message_(message) {}

  absl::Status ForEach(absl::FunctionRef<absl::Status(const Field&)> visit) {
    while (at_ < message_.size()) {
      uint64_t tag = 0;
      if (!Varint(&tag)) return Malformed();
      Field field{tag >> 3, 0, {}};
      uint64_t size = 0;
      switch (tag & 7) {
        case 0:
          if (!Varint(&field.varint)) return Malformed();
          break;
        case 1:
          size = 8;
          break;
        case 2:
          if (!Varint(&size)) return Malformed();
          break;
        case 5:
          size = 4;
          break;
        default:
          return Malformed();
      }
      if (size > message_.size() - at_) return Malformed();
      field.bytes = message_.substr(at_, size);
      at_ += size;
      RETURN_IF_ERROR(visit(field));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Malformed() const {
    return absl::InvalidArgumentError(absl::StrCat("not a SentencePiece model: offset ", at_,
                                                   " of a message of ", message_.size(), " bytes"));
  }

  bool Varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && at_ < message_.size(); shift += 7) {
      const uint8_t byte = static_cast<uint8_t>(message_[at_++]);
      *value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  const absl::string_view message_;
  size_t at_ = 0;
};

}  // namespace

absl::StatusOr<SentencePieceSpec> ReadSentencePieceSpec(absl::string_view model) {
  SentencePieceSpec spec;
  const auto trainer = [&](const Field& field) {
    if (field.number == 24) spec.treat_whitespace_as_suffix = field.varint != 0;
    if (field.number == 44) spec.unknown_surface = std::string(field.bytes);
    return absl::OkStatus();
  };
  const auto normalizer = [&](const Field& field) {
    if (field.number == 3) spec.add_dummy_prefix = field.varint != 0;
    if (field.number == 4) spec.remove_extra_whitespaces = field.varint != 0;
    return absl::OkStatus();
  };
  const auto denormalizer = [&](const Field& field) {
    if (field.number == 2 && !field.bytes.empty()) spec.has_denormalizer = true;
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(WireReader(model).ForEach([&](const Field& field) -> absl::Status {
    switch (field.number) {
      case 2:
        return WireReader(field.bytes).ForEach(trainer);
      case 3:
        return WireReader(field.bytes).ForEach(normalizer);
      case 5:
        return WireReader(field.bytes).ForEach(denormalizer);
      default:
        return absl::OkStatus();
    }
  }));
  return spec;
}

}  // namespace carrel::model
