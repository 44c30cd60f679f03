// What:   the fields of a SentencePiece model that decoding needs; the library does not give them.
// Source: sentencepiece_model.proto, read by field number: ModelProto.trainer_spec (2),
//         normalizer_spec (3), denormalizer_spec (5).
// Errors: InvalidArgument bytes that are not a protocol buffer message.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::model {

struct SentencePieceSpec {
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool treat_whitespace_as_suffix = false;
  bool has_denormalizer = false;  // with rules
  std::string unknown_surface = " \xE2\x81\x87 ";
};

absl::StatusOr<SentencePieceSpec> ReadSentencePieceSpec(absl::string_view model);

}  // namespace carrel::model
