// The module that sentencepiece_library.cc loads: libsentencepiece behind our interface.
#include <sentencepiece_processor.h>

#include <memory>

#include "model/tokenizer/sentencepiece_library.h"

namespace carrel::model {
namespace {

class Library final : public SentencePieceLibrary {
 public:
  bool LoadModel(std::string_view model, std::string* error) {
    const auto status = processor_.LoadFromSerializedProto(model);
    if (!status.ok()) *error = status.ToString();
    return status.ok();
  }

  bool Encode(std::string_view text, std::vector<int>* ids, std::string* error) const override {
    const auto status = processor_.Encode(text, ids);
    if (!status.ok()) *error = status.ToString();
    return status.ok();
  }

  int size() const override { return processor_.GetPieceSize(); }
  const std::string& name(int id) const override { return processor_.IdToPiece(id); }

  PieceKind kind(int id) const override {
    if (processor_.IsControl(id)) return PieceKind::kControl;
    if (processor_.IsUnknown(id)) return PieceKind::kUnknown;
    if (processor_.IsByte(id)) return PieceKind::kByte;
    return PieceKind::kNormal;
  }

  int bos_id() const override { return processor_.bos_id(); }

  int FindPiece(const std::string& name) const override {
    const int id = processor_.PieceToId(name);  // the unknown piece's if there is none
    return id >= 0 && id < size() && this->name(id) == name ? id : -1;
  }

 private:
  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace
}  // namespace carrel::model

extern "C" __attribute__((visibility("default"))) carrel::model::SentencePieceLibrary*
carrel_load_sentencepiece(const char* model, size_t bytes, std::string* error) {
  auto library = std::make_unique<carrel::model::Library>();
  return library->LoadModel(std::string_view(model, bytes), error) ? library.release() : nullptr;
}
