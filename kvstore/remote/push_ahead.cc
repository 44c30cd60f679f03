#include "kvstore/remote/push_ahead.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/mapped_file.h"
#include "common/status.h"
#include "kvstore/format/manifest.h"

namespace carrel::kvstore {
namespace {

// The header that a stream begins with.
absl::StatusOr<StreamHeader> HeaderOf(ContextExport& from) {
  std::string encoded;
  for (;;) {
    ASSIGN_OR_RETURN(const int64_t wanted, StreamHeader::BytesWanted(encoded));
    if (static_cast<int64_t>(encoded.size()) == wanted) break;
    ASSIGN_OR_RETURN(const absl::string_view piece, from.Next());
    if (piece.empty()) return absl::DataLossError("push: the context ends before its header does");
    encoded.append(piece.data(), piece.size());
  }
  return StreamHeader::Decode(encoded);
}

}  // namespace

PushAhead::PushAhead(const Bucket& bucket, const PushOptions& options)
    : bucket_(bucket),
      options_(options),
      ahead_([this](const FilesAhead::File& next, const auto&) { return Send(next); }) {}

absl::Status PushAhead::Send(const FilesAhead::File& next) {
  if (pusher_ == nullptr) {
    ASSIGN_OR_RETURN(pusher_, Pusher::Begin(bucket_, next.id, options_));
    id_ = next.id.ToString();
  }
  if (next.id.ToString() != id_) {
    return absl::InternalError(absl::StrCat("push: file ", next.file, " is of context ",
                                            next.id.ToString(), ", those before of ", id_));
  }
  const std::string sha256 = Sha256Hex(next.bytes->bytes());
  RETURN_IF_ERROR(pusher_->AddFile(next.file, next.bytes->bytes(), sha256, next.bytes));
  taken_[next.file] = static_cast<int64_t>(next.bytes->bytes().size());
  return absl::OkStatus();
}

absl::StatusOr<Pushed> PushAhead::Publish(const std::string& name, ContextExport& from,
                                          const std::function<void(int64_t, int64_t)>& progress) {
  const absl::Status ahead = ahead_.Finish();
  // It sends out of `from`, which may go when this returns.
  const absl::Cleanup ends = [this] { pusher_ = nullptr; };
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(from.manifest()));
  if (pusher_ != nullptr) sent_ = pusher_->sent_bytes();
  const int64_t before = sent_;
  // What failed on the way leaves a pusher that sends no more: another one finds what is there.
  const bool anew = pusher_ == nullptr || !ahead.ok() || id_ != id.ToString();
  if (anew) {
    taken_.clear();
    std::unique_ptr<Pusher> next;
    ASSIGN_OR_RETURN(next, Pusher::Begin(bucket_, id, options_));
    pusher_ = std::move(next);
  }
  ASSIGN_OR_RETURN(StreamHeader header, HeaderOf(from));
  int64_t done = 0;
  for (int64_t file = 0; file < from.files(); ++file) {
    const absl::string_view bytes = from.File(file);
    const absl::Status verified = from.VerifyFile(file);
    if (!verified.ok()) return Annotate(verified, absl::StrCat("push: file ", file));
    const auto taken = taken_.find(file);
    if (taken == taken_.end()) {
      RETURN_IF_ERROR(pusher_->AddFile(file, bytes, Sha256Hex(bytes), nullptr));
    } else if (taken->second != static_cast<int64_t>(bytes.size())) {
      return absl::DataLossError(absl::StrCat("push: file ", file, " has ", bytes.size(),
                                              " bytes, what was sent ahead of it has ",
                                              taken->second));
    }
    done += static_cast<int64_t>(bytes.size());
    progress(done, from.bytes());
  }
  absl::StatusOr<Pushed> pushed = pusher_->Publish(name, std::move(header));
  if (pushed.ok() && anew) pushed->sent_bytes += before;
  return pushed;
}

}  // namespace carrel::kvstore
