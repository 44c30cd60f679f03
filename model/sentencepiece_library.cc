#include "model/sentencepiece_library.h"

#include <dlfcn.h>

namespace carrel::model {
namespace {

#if defined(CARREL_SANITIZED)
constexpr int kOwnSymbolsFirst = 0;  // AddressSanitizer refuses it; a sanitized program that reads a tokenizer.model must not link libprotobuf
#else
constexpr int kOwnSymbolsFirst = RTLD_DEEPBIND;
#endif

// The module's entry, looked up once; null and *error if it cannot be loaded.
SentencePieceEntry* Entry(std::string* error) {
  // Found beside the program: $ORIGIN is in its run path.
  static void* const module = dlopen(kSentencePieceModule, RTLD_NOW | RTLD_LOCAL | kOwnSymbolsFirst);
  static const std::string failure = module == nullptr ? dlerror() : "";
  if (module == nullptr) {
    *error = "cannot load " + std::string(kSentencePieceModule) + ": " + failure;
    return nullptr;
  }
  auto* entry = reinterpret_cast<SentencePieceEntry*>(dlsym(module, kSentencePieceEntry));
  if (entry == nullptr) *error = std::string(kSentencePieceModule) + " has no " + kSentencePieceEntry;
  return entry;
}

}  // namespace

std::unique_ptr<SentencePieceLibrary> SentencePieceLibrary::Load(std::string_view model, std::string* error) {
  SentencePieceEntry* entry = Entry(error);
  if (entry == nullptr) return nullptr;
  return std::unique_ptr<SentencePieceLibrary>(entry(model.data(), model.size(), error));
}

}  // namespace carrel::model
