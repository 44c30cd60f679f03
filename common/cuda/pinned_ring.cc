#include "common/cuda/pinned_ring.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace carrel::cuda {

absl::StatusOr<PinnedRing> PinnedRing::Create(int64_t slots, int64_t slot_bytes) {
  if (slots < 1 || slot_bytes < 1 || slot_bytes > std::numeric_limits<int64_t>::max() / slots) {
    return absl::InvalidArgumentError(
        absl::StrCat("pinned ring: ", slots, " slots of ", slot_bytes, " bytes"));
  }
  ASSIGN_OR_RETURN(auto bytes, PinnedBuffer<uint8_t>::Create(slots * slot_bytes));
  std::vector<Event> done;
  for (int64_t i = 0; i < slots; ++i) {
    ASSIGN_OR_RETURN(Event event, Event::Create());
    done.push_back(std::move(event));
  }
  return PinnedRing(std::move(bytes), std::move(done), slot_bytes);
}

absl::StatusOr<absl::Span<uint8_t>> PinnedRing::Acquire() {
  if (acquired_ != released_) {
    return absl::FailedPreconditionError("pinned ring: acquired again before it was released");
  }
  const auto slots = static_cast<int64_t>(done_.size());
  const int64_t slot = acquired_ % slots;
  // An event that was never recorded counts as done.
  RETURN_IF_ERROR(done_[static_cast<size_t>(slot)].Synchronize());
  ++acquired_;
  return absl::MakeSpan(bytes_.data() + slot * slot_bytes_, static_cast<size_t>(slot_bytes_));
}

absl::Status PinnedRing::Release(const Stream& stream) {
  if (acquired_ == released_) {
    return absl::FailedPreconditionError("pinned ring: released before it was acquired");
  }
  const int64_t slot = released_ % static_cast<int64_t>(done_.size());
  RETURN_IF_ERROR(done_[static_cast<size_t>(slot)].Record(stream));
  ++released_;
  return absl::OkStatus();
}

}  // namespace carrel::cuda
