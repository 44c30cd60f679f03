// What:   remembers the digest of weights, so that files that have not changed since are not hashed
//         again.
// Source: a file has not changed if its device, inode, size and its times of modification and change
//         are those of then: the kernel sets the time of change at every write, whoever writes, and
//         no call sets it back. Of files changed within two seconds before they were hashed nothing
//         is kept: a later change could bear the same time. A write through a mapping that another
//         process held open all along may go unseen; models are not written that way.
// Edge:   entries are small files in a folder of the user's own; one that is damaged, or a folder that
//         cannot be read or written, costs the hashing and nothing else. Beyond 1,024 entries all are
//         dropped.
// Threads: reentrant, also between processes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carrel::model {

struct FileIdentity {
  std::string path;
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t modified_ns = 0;  // since 1970
  int64_t changed_ns = 0;

  bool operator==(const FileIdentity&) const = default;
};

// Nothing if there is no regular file at the path.
std::optional<FileIdentity> IdentifyFile(const std::string& path);

// The files that a model was read from, as they were when each was opened.
class OpenedFiles {
 public:
  // Around the opening of a file: what is open is what `before` names if both are the same.
  void Add(const std::optional<FileIdentity>& before, const std::optional<FileIdentity>& after);
  void Add(const OpenedFiles& others);
  // Empty if one of them could not be told.
  const std::vector<FileIdentity>& identities() const { return identities_; }

 private:
  bool known_ = true;
  std::vector<FileIdentity> identities_;
};

class DigestCache {
 public:
  // Nothing is remembered if `folder` is empty. It is made when something is first kept. `now_ns`:
  // nanoseconds since 1970; the system's clock unless given.
  explicit DigestCache(std::string folder, std::function<int64_t()> now_ns = {});

  // $CARREL_CACHE, else $XDG_CACHE_HOME/carrel, else $HOME/.cache/carrel; empty: no cache.
  static std::string DefaultFolder();

  // compute(), or what it returned when these files, as they were opened, were last hashed. `what`
  // names the kind of digest. No files: compute().
  std::string Get(absl::string_view what, absl::Span<const FileIdentity> files,
                  absl::FunctionRef<std::string()> compute) const;

 private:
  std::optional<std::string> Read(const std::string& path, absl::string_view key) const;
  void Write(const std::string& path, absl::string_view key, absl::string_view digest) const;

  const std::string folder_;
  const std::function<int64_t()> now_ns_;
};

}  // namespace carrel::model
