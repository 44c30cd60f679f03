// What:   remembers the digest of weights, so that files that have not changed since are not hashed
//         again.
// Source: a file has not changed if its device, inode, size and its times of modification and
//         change are those of then: the kernel sets the time of change at every write, whoever
//         writes, and no call sets it back. Of files changed within two seconds before they were
//         hashed nothing is kept: a later change could bear the same time. A write through a
//         mapping that another process held open all along may go unseen; models are not written
//         that way.
// Edge:   entries are small files in a folder of the user's own; one that is damaged, or a folder
//         that cannot be read or written, costs the hashing and nothing else. Beyond 1,024 entries
//         all are dropped.
// Threads: reentrant, also between processes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "model/model_files.h"

namespace carrel::model {

class DigestCache {
 public:
  // Nothing is remembered if `folder` is empty. It is made when something is first kept. `now_ns`:
  // nanoseconds since 1970; the system's clock unless given.
  explicit DigestCache(std::string folder, std::function<int64_t()> now_ns = {});

  // $CARREL_CACHE, else $XDG_CACHE_HOME/carrel, else $HOME/.cache/carrel; empty: no cache.
  static std::string DefaultFolder();

  // compute(), or what it returned when these files, as they were mapped, were last hashed. `what`
  // names the kind of digest. No files: compute().
  std::string Get(absl::string_view what, const ModelFiles& files,
                  absl::FunctionRef<std::string()> compute) const;

 private:
  std::optional<std::string> Read(const std::string& path, absl::string_view key) const;
  void Write(const std::string& path, absl::string_view key, absl::string_view digest) const;

  const std::string folder_;
  const std::function<int64_t()> now_ns_;
};

}  // namespace carrel::model
