// What:   the known prefixes of a prompt, by owner: documents that it may begin with, whose rows are in the store, and
//         the conversation behind such a document that it continues: rows of prompt and answer, which need not be
//         computed again.
// Documents: the prompt's tokens are hashed as a chain, block by block of kBlock; of a document the hash of its whole
//         blocks is kept, but for those that its last kSeam tokens touch. An equal hash makes a candidate; RestOf
//         compares all tokens, and says what follows the document. The text behind a document can change its last
//         tokens ("end." and "end.\n\n" may end differently): up to kSeam of them are given up
//         (decoder::GenerateOptions), and the prompt's own stand there. Documents of less than kBlock + kSeam tokens are
//         not known.
// Conversations: in memory. One that is idle too long, or finds no room in memory, is written to an unnamed file, which
//         ends with the process. Beyond the bound on their number, the least recently used one is dropped. A CRC-32C
//         per 4 KiB of a file stays in memory, so that damage is noticed. A conversation resumes only under the key
//         that created it, and only with its own next turn (docs/decisions/069-conversations.md).
// Errors: a file that cannot be written or read, or whose bytes changed: the conversation is forgotten and logged, and
//         its prompt is read again when it comes.
// Threads: any. Take and Sweep wait for the disk without a lock; the other methods never wait for it.
// Example: for (const std::string& content_id : cache.DocumentsOf(prompt)) ...;     // RestOf, with its tokens
//          cache.Put({owner, decoder.sequence().Save(), prompt_tokens}, SteadyNow());
//          if (auto before = cache.Take(owner, next_prompt)) decoder.sequence().Restore(before->sequence);
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/decoder.h"

namespace carrel::serving {

struct PrefixCacheConfig {  // of conversations
  int64_t most = 64;        // 0: none are kept
  // Of those in memory. What is beyond it waits to be written (Sweep); beyond it by kMostUnwritten it is forgotten.
  int64_t memory_bytes = int64_t{512} << 20;
  absl::Duration idle = absl::Seconds(60);  // then a sequence goes to a file
  std::string folder = "/var/tmp";          // of the files
};

// The owner, and the document before it.
struct SequenceOwner {
  std::string context, content_id;
  std::string who;       // empty: there are no keys
  int64_t given_up = 0;  // of the document's last tokens
  bool operator==(const SequenceOwner&) const = default;
};

struct Conversation {
  SequenceOwner owner;
  decoder::SavedSequence sequence;
  int64_t prompt_tokens = 0;  // of the sequence: the rest is of its last answer
};

// Whether a prompt goes on with it: it begins with all of its prompt, and is longer.
bool GoesOn(absl::Span<const TokenId> prompt, absl::Span<const TokenId> sequence,
            int64_t prompt_tokens);

struct PrefixRest {
  int64_t give_up = 0;        // of the document's last tokens
  std::vector<TokenId> rest;  // of the prompt, never empty
};
// The prompt, whatever it is, as what follows the document, of which at most so many tokens are given up;
// none: that is not enough.
std::optional<PrefixRest> RestOf(absl::Span<const TokenId> prompt,
                                 absl::Span<const TokenId> document, int64_t most_given_up);

// How many tokens two sequences begin with in common.
size_t CommonPrefix(absl::Span<const TokenId> a, absl::Span<const TokenId> b);

class PrefixCache {
 public:
  static constexpr size_t kBlock = 256, kSeam = 16;              // tokens
  static constexpr int64_t kMostUnwritten = int64_t{512} << 20;  // bytes

  explicit PrefixCache(PrefixCacheConfig config);
  ~PrefixCache();

  // Documents, by what their contexts hold; one that is there already is replaced.
  void AddDocument(const std::string& content_id, absl::Span<const TokenId> document);
  void RemoveDocument(const std::string& content_id);
  // Those that the prompt may begin with, the longest first.
  std::vector<std::string> DocumentsOf(absl::Span<const TokenId> prompt) const;

  // The conversation that the prompt goes on with, which is no longer kept; the longest, if there are several.
  std::optional<Conversation> Take(const SequenceOwner& owner, absl::Span<const TokenId> prompt);
  // The same of one in memory. in_file: it is in a file, or on its way there: Take would wait for the disk.
  struct Taken {
    std::optional<Conversation> conversation;
    bool in_file = false;
  };
  Taken TakeFromMemory(const SequenceOwner& owner, absl::Span<const TokenId> prompt);
  // True: more is in memory than may be, until the next Sweep.
  bool Put(Conversation conversation, absl::Time now);
  // Writes out what was idle for too long, or is too much.
  void Sweep(absl::Time now);
  void Forget(const std::string& context);

  int64_t in_memory() const;
  int64_t in_files() const;

 private:
  struct Document {
    std::string content_id;
    size_t tokens = 0;
  };
  class File;
  struct Kept {
    Conversation conversation;   // its rows are empty when they are in the file
    std::unique_ptr<File> file;  // null: in memory
    bool being_written = false;  // its rows are read without the lock, and stay
    absl::Time used;
  };
  using Entry = std::shared_ptr<Kept>;

  std::list<Entry>::iterator FindLocked(const SequenceOwner& owner,
                                        absl::Span<const TokenId> prompt)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The oldest that is to be written; null: none is.
  Entry NextToWriteLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t BytesInMemoryLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const PrefixCacheConfig config_;
  mutable absl::Mutex mu_;
  std::unordered_multimap<uint64_t, Document> documents_ ABSL_GUARDED_BY(mu_);  // by hash
  std::list<Entry> kept_ ABSL_GUARDED_BY(mu_);  // the one used last is first
};

}  // namespace carrel::serving
