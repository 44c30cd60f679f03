// What:   whether a stored context is what was published: every key that its manifest wants, every
//         footer, chunk table and digest; `deep`: every byte of every payload too, and whether
//         indexes and summaries open over their rows.
// Errors: damage is in the report, named by context, kind, layer, head and segment. A status is for
//         what is no damage: Cancelled.
// Cost:   without `deep` one or two pages per segment; with it all bytes are read once, those of one
//         layer being mapped at a time, and the largest index is loaded.
// Threads: any. Give it a StoredContext of its own: it lets pages go behind itself.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace carrel::kvstore {

class StoredContext;

struct VerifyReport {
  static constexpr int64_t kMostErrors = 100;
  int64_t segments = 0;             // looked at
  int64_t bytes = 0;                // of payloads that were read and found right
  int64_t error_count = 0;          // of heads and kinds that are not as they were published
  std::vector<std::string> errors;  // the first kMostErrors of them
};

// cancelled: asked between layers and heads.
absl::StatusOr<VerifyReport> VerifyContext(const StoredContext& context, bool deep,
                                           const std::function<bool()>& cancelled);

}  // namespace carrel::kvstore
