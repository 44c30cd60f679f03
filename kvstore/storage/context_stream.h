// What:   a context as one stream of bytes, which another store takes in as it is: to move and to
//         back up.
// Bytes:  header: magic "CARRELEX", version u32 = 1, name bytes u32, manifest bytes u64, files u32,
//         reserved u32 = 0, the name, the manifest as it is stored (its SHA-256 is the content id),
//         bytes u64 of each file, SHA-256 of the header so far. Then each file as it lies in the
//         store, in order of keys, and behind it its SHA-256. All numbers little-endian.
// Errors: DataLoss a stream that does not add up (names what and where), or a context that is
//         damaged; FailedPrecondition an unbound context: nothing would vouch for it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/format/context_id.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::kvstore {

inline constexpr int64_t kStreamPieceBytes = int64_t{1} << 20;

// The header of a stream, as bytes and back.
struct StreamHeader {
  std::string name;
  std::string manifest;  // serialized
  std::vector<int64_t> file_bytes;

  std::string Encode() const;
  // Of the bytes so far: how many the header has, or, where that is not known yet, how many say it.
  static absl::StatusOr<int64_t> BytesWanted(absl::string_view so_far);
  // Takes what the header lacks off the front of `bytes`; true: it is whole.
  static absl::StatusOr<bool> Take(std::string& so_far, absl::string_view& bytes);
  static absl::StatusOr<StreamHeader> Decode(absl::string_view all);  // BytesWanted() of them
};
inline constexpr int64_t kStreamDigestBytes = 32;
// SHA-256 as a stream has it: 32 bytes.
std::string StreamDigest(absl::string_view bytes);
inline constexpr int64_t kMostStreamFiles = 1 << 20;

// A context on its way out. Keeps its files mapped, also when it is deleted meanwhile. Not
// thread-safe.
class ContextExport {
 public:
  virtual ~ContextExport() = default;
  virtual const v1::Manifest& manifest() const = 0;
  virtual const StreamHeader& header() const = 0;
  virtual int64_t bytes() const = 0;  // of the whole stream
  // The next piece, at most kStreamPieceBytes, valid until the next call; empty: all was given.
  // Every byte of a segment is verified before it is given.
  virtual absl::StatusOr<absl::string_view> Next() = 0;

  // For whoever sends files one by one: how many there are, and the bytes of one, as they are mapped; they
  // live as long as this. What Next gave the digest of, or VerifyFile looked at, is verified.
  virtual int64_t files() const = 0;
  virtual absl::string_view File(int64_t file) const = 0;
  // Reads all of it: that every segment of it is what the manifest says. DataLoss: which is not. sha256: gets the
  // file's, in hex; null: nobody asks. By several threads at a time, also beside File.
  virtual absl::Status VerifyFile(int64_t file, std::string* sha256 = nullptr) = 0;
};

// A context on its way in, below STORE/importing. What arrived stays there until Publish, so that an
// import that was interrupted goes on where it was, by this process or another: position() then
// jumps once the header is known. Not thread-safe.
class ContextImport {
 public:
  virtual ~ContextImport() = default;
  // Offset in the stream of what is to come next.
  virtual int64_t position() const = 0;
  virtual int64_t bytes() const = 0;  // of the whole stream; 0 before the header is known
  // First of all calls, where the context is still being computed: what comes is not the stream but
  // file `file` of it, and behind it its SHA-256. Kept as of an interrupted import; Publish is
  // refused. InvalidArgument: no such file can be.
  virtual absl::Status BeginAhead(ContextId id, int64_t file, int64_t bytes) = 0;
  // `bytes` from position() on. AlreadyExists: the store has the name, or the context under any
  // that its importer sees.
  // FailedPrecondition: another import of the context is going on. ResourceExhausted: disk full.
  virtual absl::Status Take(absl::string_view bytes) = 0;
  // Once position() is bytes(): checks every segment against the manifest, and makes the context
  // visible, wholly and at once. What is refused as damaged is removed: another attempt begins anew.
  virtual absl::StatusOr<v1::Manifest> Publish() = 0;
};

// Gives some bytes of a stream from an offset on, at most a few MiB; none where it ends. They hold until the next call.
using StreamSourceFn = std::function<absl::StatusOr<absl::string_view>(int64_t offset)>;
// Takes all of a stream that is not here yet, and publishes. progress: told position and bytes of the whole.
absl::StatusOr<v1::Manifest> ImportFrom(
    absl::FunctionRef<absl::StatusOr<absl::string_view>(int64_t offset)> source,
    ContextImport& into, absl::FunctionRef<void(int64_t position, int64_t bytes)> progress);

// For whom a store takes a context in. By default: whoever may see and do everything.
struct ImportGuard {
  // What imports of one owner left, only his go on with: the rest of a stream is not to be had for
  // its header. Empty: whoever has no owner.
  std::string owner;
  // Whether he may know of a context of this name. If not, then that it is the same as his he is told
  // once he has sent all of it, and not its name. Null: yes.
  std::function<bool(const std::string& name)> sees;
  // Whether he may bring a context of this name and size. Asked once the header is known, before
  // anything is kept. Null: yes.
  std::function<absl::Status(const std::string& name, int64_t bytes)> admit;
  // How many bytes of his interrupted imports may stay beside it: the oldest go. Asked after admit.
  // Null: all.
  std::function<int64_t()> most_remains;
};

}  // namespace carrel::kvstore
