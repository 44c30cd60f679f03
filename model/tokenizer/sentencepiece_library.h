// What:   the fence around libsentencepiece, which stands in a module of its own, loaded when a
//         tokenizer.model is: Debian's library exports the protobuf runtime that is built into it,
//         and a program that links it beside libprotobuf crashes when it starts
//         (docs/decisions/013). Its header also defines absl::string_view as std::string_view, so
//         this one speaks std only.
// Errors: false or nullptr, and what the library says in *error.
// Threads: immutable once loaded, reentrant.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace carrel::model {

class SentencePieceLibrary {
 public:
  enum class PieceKind { kNormal, kByte, kControl, kUnknown };

  // `model` is the content of a tokenizer.model.
  static std::unique_ptr<SentencePieceLibrary> Load(std::string_view model, std::string* error);
  virtual ~SentencePieceLibrary() = default;

  virtual bool Encode(std::string_view text, std::vector<int>* ids, std::string* error) const = 0;

  virtual int size() const = 0;                       // ids are 0 to size - 1
  virtual const std::string& name(int id) const = 0;  // the piece as the model spells it
  virtual PieceKind kind(int id) const = 0;           // user-defined and unused pieces are kNormal
  virtual int bos_id() const = 0;                     // -1: none
  virtual int FindPiece(const std::string& name) const = 0;  // -1: none
};

// What the module exports: the library over a model, owned by the caller, or null and *error.
inline constexpr char kSentencePieceModule[] = "libcarrel_sentencepiece.so";
inline constexpr char kSentencePieceEntry[] = "carrel_load_sentencepiece";
using SentencePieceEntry = SentencePieceLibrary*(const char* model, size_t bytes,
                                                 std::string* error);

}  // namespace carrel::model
