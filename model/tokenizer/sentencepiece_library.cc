#include "model/tokenizer/sentencepiece_library.h"

#include <dlfcn.h>
#include <unistd.h>

namespace carrel::model {
namespace {

#if defined(CARREL_SANITIZED)
constexpr int kOwnSymbolsFirst =
    0;  // AddressSanitizer refuses it; a sanitized program that reads a tokenizer.model must not link libprotobuf
#else
constexpr int kOwnSymbolsFirst = RTLD_DEEPBIND;
#endif

// Beside the program, else where libraries are (a sanitizer's dlopen does not know the program's run path).
void* LoadModule() {
  constexpr int kHow = RTLD_NOW | RTLD_LOCAL | kOwnSymbolsFirst;
  char program[4096];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof(program));
  if (length > 0 && length < static_cast<ssize_t>(sizeof(program))) {
    const std::string path(program, static_cast<size_t>(length));
    const std::string beside = path.substr(0, path.rfind('/') + 1) + kSentencePieceModule;
    if (void* module = dlopen(beside.c_str(), kHow); module != nullptr) return module;
  }
  return dlopen(kSentencePieceModule, kHow);
}

// The module's entry, looked up once; null and *error if it cannot be loaded.
SentencePieceEntry* Entry(std::string* error) {
  static void* const module = LoadModule();
  static const std::string failure = module == nullptr ? dlerror() : "";
  if (module == nullptr) {
    *error = "cannot load " + std::string(kSentencePieceModule) + ": " + failure;
    return nullptr;
  }
  auto* entry = reinterpret_cast<SentencePieceEntry*>(dlsym(module, kSentencePieceEntry));
  if (entry == nullptr)
    *error = std::string(kSentencePieceModule) + " has no " + kSentencePieceEntry;
  return entry;
}

}  // namespace

std::unique_ptr<SentencePieceLibrary> SentencePieceLibrary::Load(std::string_view model,
                                                                 std::string* error) {
  SentencePieceEntry* entry = Entry(error);
  if (entry == nullptr) return nullptr;
  return std::unique_ptr<SentencePieceLibrary>(entry(model.data(), model.size(), error));
}

}  // namespace carrel::model
