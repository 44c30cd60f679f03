#include "kvstore/remote/pull.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/thrown.h"

namespace carrel::kvstore {

absl::StatusOr<std::unique_ptr<BucketStream>> BucketStream::Open(const Bucket& bucket,
                                                                 const std::string& name,
                                                                 const PullOptions& options) {
  ASSIGN_OR_RETURN(const BoundName bound, bucket.ReadName(name));
  ASSIGN_OR_RETURN(BucketManifest manifest, bucket.ReadManifestOf(bound));
  return std::unique_ptr<BucketStream>(
      new BucketStream(bucket, bound, std::move(manifest), options));
}

BucketStream::BucketStream(const Bucket& bucket, BoundName name, BucketManifest manifest,
                           const PullOptions& options)
    : bucket_(bucket), name_(std::move(name)), manifest_(std::move(manifest)), options_(options) {
  header_ = manifest_.header.Encode();
  bytes_ = static_cast<int64_t>(header_.size());
  for (size_t i = 0; i < manifest_.digests.size(); ++i) {
    digests_.push_back(absl::HexStringToBytes(manifest_.digests[i]));
    begins_.push_back(bytes_);
    bytes_ += manifest_.header.file_bytes[i] + kStreamDigestBytes;
  }
  for (int i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { Run(); });
}

BucketStream::~BucketStream() {
  {
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void BucketStream::Tell(const std::string& text) {
  absl::MutexLock lock(&tell_mu_);
  if (options_.tell != nullptr) options_.tell(text);
}

void BucketStream::Restart() {
  absl::MutexLock lock(&mu_);
  ranges_.clear();  // those on their way are their threads'
  begun_ = 0;
}

int64_t BucketStream::FileAt(int64_t offset) const {
  const auto it = std::lower_bound(begins_.begin(), begins_.end(), offset);
  return it != begins_.end() && *it == offset ? it - begins_.begin() : -1;
}

std::string BucketStream::FileUri(int64_t file) const {
  return bucket_.client().UriOf(
      bucket_.FileKey(name_.context_id, file, manifest_.digests[static_cast<size_t>(file)]));
}

absl::StatusOr<absl::string_view> BucketStream::At(int64_t offset) {
  const auto header = static_cast<int64_t>(header_.size());
  if (offset >= bytes_) return absl::string_view();
  if (offset < header) {
    return absl::string_view(header_).substr(static_cast<size_t>(offset), kStreamPieceBytes);
  }
  const int64_t file =
      std::upper_bound(begins_.begin(), begins_.end(), offset) - begins_.begin() - 1;
  const auto i = static_cast<size_t>(file);
  const int64_t within = offset - begins_[i], size = manifest_.header.file_bytes[i];
  if (within >= size) {
    return absl::string_view(digests_[i]).substr(static_cast<size_t>(within - size));
  }
  return FileBytes(file, within);
}

// Ranges from there on, until enough are ahead. They begin anew where offsets jumped.
void BucketStream::Plan(int64_t file, int64_t begin) {
  const auto holds = [&](const Range& range) {
    return range.file == file && range.begin <= begin && begin < range.end;
  };
  while (!ranges_.empty() && !holds(*ranges_.front())) {
    ranges_.pop_front();
    if (begun_ > 0) --begun_;
  }
  if (ranges_.empty()) {
    begun_ = 0;
    next_file_ = file;
    next_begin_ = begin;
  }
  while (static_cast<int>(ranges_.size()) < options_.ahead &&
         next_file_ < static_cast<int64_t>(begins_.size())) {
    const int64_t size = manifest_.header.file_bytes[static_cast<size_t>(next_file_)];
    if (next_begin_ >= size) {
      ++next_file_;
      next_begin_ = 0;
      continue;
    }
    auto range = std::make_shared<Range>();
    range->file = next_file_;
    range->begin = next_begin_;
    range->end = next_begin_ = std::min(size, next_begin_ + options_.range_bytes);
    ranges_.push_back(std::move(range));
  }
}

absl::Status BucketStream::Fetch(Range& range) {
  const std::string key = bucket_.FileKey(name_.context_id, range.file,
                                          manifest_.digests[static_cast<size_t>(range.file)]);
  const int64_t whole = manifest_.header.file_bytes[static_cast<size_t>(range.file)];
  range.bytes.clear();
  range.bytes.reserve(static_cast<size_t>(range.end - range.begin));
  ASSIGN_OR_RETURN(const ObjectInfo info,
                   bucket_.client().Get(key, {.begin = range.begin, .end = range.end},
                                        [&](absl::string_view bytes) {
                                          range.bytes.append(bytes.data(), bytes.size());
                                          return absl::OkStatus();
                                        }));
  if (info.size == whole) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(bucket_.client().UriOf(key), ": it has ", info.size,
                                          " bytes, the manifest says ", whole));
}

void BucketStream::Run() {
  for (;;) {
    std::shared_ptr<Range> range;
    {
      absl::MutexLock lock(&mu_);
      const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return ended_ || begun_ < ranges_.size();
      };
      mu_.Await(absl::Condition(&work));
      if (ended_) return;
      range = ranges_[begun_++];
    }
    absl::Status status = CatchThrown("fetching", [&] { return Fetch(*range); });
    if (absl::IsDataLoss(status)) {
      Tell(absl::StrCat(status.message(), "; it is fetched once more"));
      status = CatchThrown("fetching", [&] { return Fetch(*range); });
    }
    absl::MutexLock lock(&mu_);
    range->status = std::move(status);
    range->done = true;
  }
}

absl::StatusOr<absl::string_view> BucketStream::FileBytes(int64_t file, int64_t begin) {
  {
    absl::MutexLock lock(&mu_);
    Plan(file, begin);
    shown_ = ranges_.front();
    const Range& range = *shown_;
    mu_.Await(absl::Condition(&range.done));
    if (absl::IsNotFound(range.status)) {
      return absl::NotFoundError(absl::StrCat("context \"", name_.name,
                                              "\" was removed meanwhile, or lost a file (",
                                              range.status.message(), ")"));
    }
    RETURN_IF_ERROR(range.status);
  }
  return absl::string_view(shown_->bytes)
      .substr(static_cast<size_t>(begin - shown_->begin), kStreamPieceBytes);
}

absl::Status PullContext(BucketStream& stream,
                         const std::function<absl::Status(const StreamSourceFn&)>& import) {
  std::set<int64_t> again;  // files that were fetched a second time
  for (bool refused = false;; refused = true) {
    bool reached_end = false, given_up = false;
    // What is whole is not asked for again: after a refusal the first file that is asked for is the one
    // that was refused.
    bool sought = refused;
    stream.Restart();
    const auto name_refused = [&](int64_t file) -> absl::Status {
      const std::string what =
          absl::StrCat(stream.FileUri(file), ": its bytes are not those of its digest");
      if (!again.insert(file).second) return absl::DataLossError(what + ", fetched twice");
      stream.Tell(what + "; it is fetched once more");
      return absl::OkStatus();
    };
    const absl::Status status = import([&](int64_t offset) -> absl::StatusOr<absl::string_view> {
      const int64_t file = stream.FileAt(offset);
      absl::StatusOr<absl::string_view> bytes = absl::string_view();
      if (sought && file >= 0) {
        sought = false;
        if (absl::Status named = name_refused(file); !named.ok()) bytes = std::move(named);
      }
      reached_end |= offset >= stream.bytes();
      if (bytes.ok()) bytes = stream.At(offset);
      given_up |= !bytes.ok();
      return bytes;
    });
    // A refusal without a file to fetch again would only come again.
    if (!absl::IsDataLoss(status) || reached_end || given_up || sought) return status;
  }
}

}  // namespace carrel::kvstore
