// What: the flags of a server whose contexts are in a bucket.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/replica/residence.h"
#include "kvstore/replica/warming.h"
#include "tools/carrel/bucket_flags.h"

namespace CLI {
class App;
}

namespace carrel::kvstore {
class Engine;
class Store;
}  // namespace carrel::kvstore

namespace carrel::tools {

// Who waits for a name, or for an answer, is told within five seconds that the bucket does not answer.
inline constexpr kvstore::RetryPolicy kSoon = {.attempts = 4,
                                               .first = absl::Milliseconds(50),
                                               .most = absl::Milliseconds(500),
                                               .deadline = absl::Seconds(4)};

struct ReplicaFlags {
  std::string remote, cache;
  int64_t cache_bytes = 0;
  int pulls = 2;
  std::vector<std::string> warm;
  BucketFlags bucket;

  bool given() const { return !remote.empty(); }
  void Declare(CLI::App& command);
  // folder: of --store; becomes that of --cache. InvalidArgument: what does not go together.
  absl::Status Resolve(bool read_only, std::string& folder) const;
  // Null: none is wanted. The engine outlives it, and what the target refers to. target: null: TargetOf the engine.
  absl::StatusOr<std::unique_ptr<kvstore::Residence>> Start(
      kvstore::Engine& engine, const kvstore::ResidenceTarget* target = nullptr) const;
  // Brings what --warm names; ready: told once all of it is here, may be null. Null: there is nothing to bring.
  std::unique_ptr<kvstore::Warming> StartWarming(kvstore::Residence* residence,
                                                 std::function<void()> ready) const;
};

}  // namespace carrel::tools
