// What:   how a context's document begins and ends, in tokens: what a prompt behind it is encoded by. Kept
//         of the contexts that were asked last.
// Errors: as StoreAccess::DocumentTokens; of a server that does not tell them (of an older version, or not to
//         this caller) nothing is known, which is no error.
// Threads: any.     Cost: the document's tokens, read once.
#pragma once

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/ids.h"
#include "library/store_access.h"

namespace carrel::library {

struct DocumentEnds {
  static constexpr size_t kFirst = 1024;
  bool known = false;
  int64_t tokens = 0;
  std::vector<TokenId> first;  // kFirst, or all
  std::vector<TokenId> last;   // model::kSeamTail, or all
};

class DocumentEndsCache {
 public:
  absl::StatusOr<DocumentEnds> Of(const std::string& context, const std::string& content_id,
                                  StoreAccess& store);

 private:
  static constexpr size_t kMost = 64;
  struct Kept {
    std::string content_id;
    DocumentEnds ends;
  };
  absl::Mutex mu_;
  std::list<Kept> kept_ ABSL_GUARDED_BY(mu_);  // the one asked last is first
};

}  // namespace carrel::library
