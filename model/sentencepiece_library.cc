#include "model/sentencepiece_library.h"

#include <sentencepiece_processor.h>

#include <utility>

namespace carrel::model {

SentencePieceLibrary::SentencePieceLibrary(
    std::unique_ptr<const sentencepiece::SentencePieceProcessor> processor)
    : processor_(std::move(processor)) {}

SentencePieceLibrary::~SentencePieceLibrary() = default;

std::unique_ptr<SentencePieceLibrary> SentencePieceLibrary::Load(std::string_view model,
                                                                 std::string* error) {
  auto processor = std::make_unique<sentencepiece::SentencePieceProcessor>();
  const auto status = processor->LoadFromSerializedProto(model);
  if (!status.ok()) {
    *error = status.ToString();
    return nullptr;
  }
  return std::unique_ptr<SentencePieceLibrary>(new SentencePieceLibrary(std::move(processor)));
}

bool SentencePieceLibrary::Encode(std::string_view text, std::vector<int>* ids,
                                  std::string* error) const {
  const auto status = processor_->Encode(text, ids);
  if (!status.ok()) *error = status.ToString();
  return status.ok();
}

int SentencePieceLibrary::size() const { return processor_->GetPieceSize(); }

const std::string& SentencePieceLibrary::name(int id) const { return processor_->IdToPiece(id); }

SentencePieceLibrary::PieceKind SentencePieceLibrary::kind(int id) const {
  if (processor_->IsControl(id)) return PieceKind::kControl;
  if (processor_->IsUnknown(id)) return PieceKind::kUnknown;
  if (processor_->IsByte(id)) return PieceKind::kByte;
  return PieceKind::kNormal;
}

int SentencePieceLibrary::bos_id() const { return processor_->bos_id(); }

int SentencePieceLibrary::FindPiece(const std::string& name) const {
  const int id = processor_->PieceToId(name);  // the unknown piece's if there is none
  return id >= 0 && id < size() && this->name(id) == name ? id : -1;
}

}  // namespace carrel::model
