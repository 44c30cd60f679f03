// What:   a document as clients see it: on its way into the store, or a context there.
// Threads: reentrant.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"

namespace carrel::model {
struct ModelConfig;
}

namespace carrel::serving {

enum class DocumentState : uint8_t { kQueued = 0, kPrefilling = 1, kReady = 2, kFailed = 3 };

struct Document {
  std::string name;
  DocumentState state = DocumentState::kQueued;
  double progress = 0;  // 0 .. 1
  std::string where;    // of prefill, for people
  absl::Status error;   // why it failed
  int64_t tokens = 0;
  int64_t bytes = 0;       // stored
  std::string content_id;  // once it is ready
  std::string index;
  int64_t created_unix_s = 0;
  bool usable = true;  // of this model, as it is opened here; only such are answered from
  bool resident =
      true;  // here; else it is brought when somebody asks it, and whether it is usable is known then
};

// InvalidArgument (code context_length_exceeded): it is empty, or leaves the model no room for a question.
absl::Status CheckDocumentLength(const model::ModelConfig& config,
                                 const std::vector<TokenId>& tokens);

// What is said of a name that another document has.
absl::Status AnotherDocuments(const std::string& name);

// Bytes of a document's rows, as quotas count those that are not there yet.
int64_t ExpectedBytes(const model::ModelConfig& config, int64_t tokens);

// As names of contexts are made of them.
std::string DigestOf(const std::vector<TokenId>& tokens);

// Counts one that was taken in; end: "ready", "failed", "cancelled".
void CountDocument(absl::string_view end);

// Of a document that is not there yet: Unavailable with how far it is, and when to come again.
absl::Status BeingRead(const Document& document);

}  // namespace carrel::serving
