// What:   the fence around libsentencepiece. Its header defines absl::string_view as
//         std::string_view, so no file may include both it and Abseil: this one speaks std only.
// Errors: false or nullptr, and what the library says in *error.
// Threads: immutable once loaded, reentrant.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace carrel::model {

class SentencePieceLibrary {
 public:
  enum class PieceKind { kNormal, kByte, kControl, kUnknown };

  // `model` is the content of a tokenizer.model.
  static std::unique_ptr<SentencePieceLibrary> Load(std::string_view model, std::string* error);
  ~SentencePieceLibrary();

  bool Encode(std::string_view text, std::vector<int>* ids, std::string* error) const;

  int size() const;                              // ids are 0 to size - 1
  const std::string& name(int id) const;         // the piece as the model spells it
  PieceKind kind(int id) const;                  // user-defined and unused pieces are kNormal
  int bos_id() const;                            // -1: none
  int FindPiece(const std::string& name) const;  // -1: none

 private:
  explicit SentencePieceLibrary(
      std::unique_ptr<const sentencepiece::SentencePieceProcessor> processor);
  const std::unique_ptr<const sentencepiece::SentencePieceProcessor> processor_;
};

}  // namespace carrel::model
