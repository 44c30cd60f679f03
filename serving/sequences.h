// What:   conversations that wait for their next turn: what a decoder computed behind a document (prompt and
//         answer), so that a prompt that begins with it is not read again. In memory; what is idle for longer
//         than a bound, or more than memory's share, is written to a file without a name, which goes with the
//         process; beyond the number of sequences the one that was used longest ago goes.
//         Of a file's rows a CRC-32C per 4 KiB stays in memory: a disk that rots is noticed.
// Access: a conversation goes on only under the key that began it.
// Errors: a file that cannot be written or read, or has other bytes than were written: the sequence is forgotten,
//         and read again when it comes; the log says why.
// Threads: any. Take and Sweep wait for the disk, and hold no lock meanwhile; all others never do.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "decoder/decoder.h"

namespace carrel::serving {

struct SequencesConfig {
  int64_t most = 64;  // 0: none are kept
  // Of those in memory. What is beyond it waits to be written (Sweep); beyond it by kMostUnwritten it is forgotten.
  int64_t memory_bytes = int64_t{512} << 20;
  absl::Duration idle = absl::Seconds(60);  // then a sequence goes to a file
  std::string folder = "/var/tmp";          // of the files
};

// Whose, and behind which document.
struct SequenceOwner {
  std::string context, content_id;
  std::string who;       // empty: there are no keys
  int64_t given_up = 0;  // of the document's last tokens
  bool operator==(const SequenceOwner&) const = default;
};

struct Conversation {
  SequenceOwner owner;
  decoder::Sequence sequence;
  int64_t prompt_tokens = 0;  // of the sequence: the rest is of its last answer
};

// Whether a prompt goes on with it: it begins with all of its prompt, and is longer.
bool GoesOn(absl::Span<const TokenId> prompt, absl::Span<const TokenId> sequence,
            int64_t prompt_tokens);

class Sequences {
 public:
  static constexpr int64_t kMostUnwritten = int64_t{512} << 20;  // bytes

  explicit Sequences(SequencesConfig config);
  ~Sequences();

  // The one that the prompt goes on with, which is no longer kept; the longest, if there are several.
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

  const SequencesConfig config_;
  mutable absl::Mutex mu_;
  std::list<Entry> kept_ ABSL_GUARDED_BY(mu_);  // the one used last is first
};

}  // namespace carrel::serving
