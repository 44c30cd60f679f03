// What:   the documents of a service: contexts of its store, and those that are being made. One thread
//         prefills, one document at a time, beside the one that decodes. Documents are deduplicated by
//         their tokens, and a prompt that begins with one is recognised.
// Errors: InvalidArgument a name, or a document that is empty or longer than the model was trained for (code
//         context_length_exceeded); AlreadyExists the name is another document's, or the document has another
//         name (code context_exists); ResourceExhausted as many wait as may; FailedPrecondition the store is not
//         this process's to write, or a context is being read; NotFound. Prefill failures are reported in
//         Document::error; what the machine lacked says so (status_details.h). A failed document leaves only its error,
//         which is listed until it is deleted.
// Fresh:  what this process publishes or deletes is seen at once. List and Get see what other processes publish or delete
//         within a second; Get finds a name at once that it did not know.
// Restart: what was added and is not ready lies in files of the store (waiting_documents.h) and goes on
//         by itself, after its last finished layer, unless the model is another now: then it has failed.
//         Other unfinished prefills that lie in the store are listed as failed, and removable. What was kept
//         unasked is forgotten until it comes again.
// Withdrawn: a document whose bringer may bring it no more (Bringer::still, asked twice a second; after a restart
//         DocumentsConfig::still_may) ends, whether it waits or is read, and leaves nothing. What is a context by
//         then is the store's.
// Threads: any. Watchers are called under a lock: they must not come back here.
// Ownership: keeps model and store; the scheduler outlives it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/config.h"
#include "library/loaded_model.h"
#include "library/store_access.h"
#include "serving/document.h"
#include "serving/document_jobs.h"
#include "serving/prefix_cache.h"
#include "serving/scheduler.h"

namespace carrel::serving {

struct DocumentsConfig {
  library::StoreAddress address;  // of the store
  bool writable = false;
  std::string why_not_writable;  // what a bringer is told; empty: that a folder is needed
  std::string index = "flat";    // of contexts that are made here
  bool on_gpu = false;           // prefill
  int64_t max_queued = 16;       // documents that wait for prefill; one more is refused
  int64_t keep =
      0;  // contexts of prompts that are kept unasked, of one key; the least recently used goes
  int64_t keep_tokens = 4096;  // of a prompt's document, at least
  // What comes behind a document of these tokens in a question (chat_probe.h); null: plain questions.
  std::function<std::vector<TokenId>(absl::Span<const TokenId> document)> probe;
  // How contexts are opened here, which says whether they are usable.
  decoder::RetrievalConfig retrieval;
  bool derived_weights = false;
  // Whether the bringer `who` (Bringer::who) may still bring a context of the name; null: always.
  std::function<absl::Status(const std::string& who, const std::string& context)> still_may;
};

class Documents {
 public:
  // Whether the caller sees a context of this name.
  using Sees = std::function<bool(const std::string& name)>;
  // The caller that brings a document.
  struct Bringer {
    Sees sees;                    // of the names that there are already
    std::shared_ptr<void> place;  // of TakePlace; held until the context is listed
    std::string who;              // as documents that wait remember it; empty: no key
    std::string tenant;           // of the key; empty: none
    // Whether he may still have a context of this name made; asked on a thread that may not wait for long. Null: he may.
    std::function<absl::Status(const std::string& name)> still;
  };
  using Watcher = DocumentWatcher;

  static absl::StatusOr<std::unique_ptr<Documents>> Create(
      const DocumentsConfig& config, std::shared_ptr<library::LoadedModel> model,
      std::shared_ptr<library::StoreAccess> store, Scheduler* scheduler);
  virtual ~Documents() = default;  // what is being prefilled stops; watchers are told

  virtual absl::StatusOr<std::vector<Document>> List() = 0;  // by name
  virtual absl::StatusOr<Document> Get(const std::string& name) = 0;

  struct Added {
    Document document;
    bool existed = false;  // under this name or another: the same tokens by the same model
  };
  // name: empty: one made of the tokens' digest.
  virtual absl::StatusOr<Added> Add(const std::string& name, std::vector<TokenId> tokens,
                                    Bringer by) = 0;
  // A place in a quota: what `take` gives, told how many contexts and bytes there are of those that are
  // counted and for which no place is held. Nothing is listed meanwhile: none is counted twice, or never.
  using Take =
      std::function<absl::StatusOr<std::shared_ptr<void>>(int64_t contexts, int64_t bytes)>;
  virtual absl::StatusOr<std::shared_ptr<void>> TakePlace(const Sees& counted,
                                                          const Take& take) = 0;
  // Cancels what is not ready; a context goes unless it is being read.
  virtual absl::Status Delete(const std::string& name) = 0;
  // Tells how it is now, each change, and the same again twice a second, for watchers with a clock; until it is ready
  // or failed.
  virtual absl::Status Watch(const std::string& name, Watcher watcher) = 0;

  struct Recognised {
    std::string name, content_id;
    PrefixRest prompt;  // behind the document
  };
  // The longest document that the prompt begins with, but for that many of its last tokens.
  virtual std::optional<Recognised> Recognise(absl::Span<const TokenId> prompt,
                                              int64_t most_given_up, const Sees& sees) = 0;
  // As Add, under a name of kvstore/access/kept_name.h, of whose keeper's there are at most config.keep: once this one
  // is taken, the one used longest ago goes.
  virtual absl::StatusOr<Added> Keep(const std::string& name, std::vector<TokenId> tokens,
                                     Bringer by) = 0;
  virtual int64_t queued() const = 0;
};

}  // namespace carrel::serving
