// What:   conversations that wait for their next turn: what a decoder computed behind a document (prompt and
//         answer), so that a prompt that begins with it is not read again. In memory; what is idle for longer
//         than a bound, or more than memory's share, is written to a file without a name, which goes with the
//         process; beyond the number of sequences the one that was used longest ago goes.
//         Of a file's rows a CRC-32C per 4 KiB stays in memory: a disk that rots is noticed.
// Access: only who asked before goes on with a sequence.
// Errors: a file that cannot be written or read, or has other bytes than were written: the sequence is forgotten,
//         and read again when it comes; the log says why.
// Threads: one.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "decoder/decoder.h"

namespace carrel::serving {

struct SequencesConfig {
  int64_t most = 64;                          // 0: none are kept
  int64_t memory_bytes = int64_t{512} << 20;  // of those in memory
  absl::Duration idle = absl::Seconds(60);    // then a sequence goes to a file
  std::string folder = "/var/tmp";            // of the files
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
  explicit Sequences(SequencesConfig config) : config_(std::move(config)) {}
  ~Sequences();

  // The one that the prompt goes on with, which is no longer kept; the longest, if there are several.
  std::optional<Conversation> Take(const SequenceOwner& owner, absl::Span<const TokenId> prompt);
  void Put(Conversation conversation, absl::Time now);
  // Writes out what was idle for too long.
  void Sweep(absl::Time now);
  void Forget(const std::string& context);

  int64_t in_memory() const;
  int64_t in_files() const { return static_cast<int64_t>(kept_.size()) - in_memory(); }

 private:
  struct Kept {
    Conversation conversation;  // its rows are empty when they are in the file
    int64_t floats = 0;
    std::vector<uint32_t> crcs;  // of the file
    int fd = -1;
    absl::Time used;
  };
  int64_t bytes_in_memory() const;
  bool WriteOut(Kept& kept) const;  // false: it is lost
  bool ReadBack(Kept& kept) const;
  void Close(Kept& kept) const;

  // Of rows, in chunks of kChunkBytes.
  static constexpr size_t kChunkBytes = 4096;
  static std::vector<uint32_t> CrcsOf(const decoder::Sequence& sequence);

  const SequencesConfig config_;
  std::list<Kept> kept_;  // the one used last is first
};

}  // namespace carrel::serving
