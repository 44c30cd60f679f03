#include "model/tokenizer/sentencepiece_reference.h"

#include <sentencepiece_processor.h>

#include <cstdlib>

namespace carrel::model {

std::string SentencePieceReferenceDecode(std::string_view model, const std::vector<int>& ids) {
  sentencepiece::SentencePieceProcessor processor;
  std::string text;
  if (!processor.LoadFromSerializedProto(model).ok() || !processor.Decode(ids, &text).ok()) {
    std::abort();
  }
  return text;
}

}  // namespace carrel::model
