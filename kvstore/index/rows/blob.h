// What:      the bytes of a built index, or of summaries: mapped chunks of a stored context,
//            verified when they are used, or bytes in memory.
// Errors:    DataLoss damaged or missing bytes (names context, layer, head, segment); OutOfRange.
// Ownership: keeps its segments pinned.   Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"

namespace carrel::kvstore {

enum class Kind : uint8_t;
class PinnedSegment;
class StoredContext;

class Blob {
 public:
  Blob() = default;         // no bytes
  Blob(std::string bytes);  // trusted: of a builder, or of a test
  // kind: kIndex, kSummaries or kSampledQueries. Touches no byte of the payload. A head without
  // them has an empty blob.
  static absl::StatusOr<Blob> Open(const StoredContext& context, Layer layer, Kind kind,
                                   KvHead kv_head);

  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  bool mapped() const { return !segments_.empty(); }

  // Bytes from `offset` on are contiguous up to the next multiple of kIndexChunkBytes. Use after
  // Verify covered them.
  const char* Address(int64_t offset) const {
    return bases_[static_cast<size_t>(offset / chunk_bytes_)] + offset % chunk_bytes_;
  }
  // [begin, end), within one such multiple.
  absl::string_view View(int64_t begin, int64_t end) const {
    return begin == end ? absl::string_view()
                        : absl::string_view(Address(begin), static_cast<size_t>(end - begin));
  }
  absl::Status Verify(int64_t begin, int64_t end) const;
  // Starts reading all of it, where pages come one by one.
  void AskAhead() const;

  // All bytes, verified.
  absl::StatusOr<std::string> Read() const;

 private:
  int64_t size_ = 0;
  int64_t chunk_bytes_ = INT64_MAX;
  std::vector<const char*> bases_;
  std::vector<std::shared_ptr<const PinnedSegment>> segments_;  // of a stored context
  std::shared_ptr<const std::string> bytes_;                    // else
};

}  // namespace carrel::kvstore
