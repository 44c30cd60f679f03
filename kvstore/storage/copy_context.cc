#include <algorithm>
#include <utility>

#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/stored_context.h"

namespace carrel::kvstore {
namespace {

class Copier {
 public:
  Copier(const StoredContext& from, ContextId to, const std::string& folder)
      : from_(from), manifest_(from.manifest()), to_(to), folder_(folder) {}

  absl::StatusOr<std::vector<std::string>> Run(absl::FunctionRef<void(double)> progress) {
    RETURN_IF_ERROR(CopyTokenIds());
    const auto layers = static_cast<int32_t>(manifest_.layers());
    for (int32_t layer = 0; layer < layers; ++layer) {
      RETURN_IF_ERROR(CopyLayer(layer));
      from_.ReleasePages(layer);
      progress(static_cast<double>(layer + 1) / layers);
    }
    return std::move(paths_);
  }

 private:
  absl::Status Begin(const std::string& name) {
    paths_.push_back(absl::StrCat(folder_, "/", name, ".sst"));
    ASSIGN_OR_RETURN(writer_, SstWriter::Create(paths_.back()));
    added_ = 0;
    return absl::OkStatus();
  }

  // A file of no segments is none.
  absl::Status End() {
    if (added_ > 0) return std::exchange(writer_, nullptr)->Finish();
    paths_.pop_back();
    writer_.reset();
    return absl::OkStatus();
  }

  // All segments of a kind and head, verified; adds their payload bytes to `bytes`.
  absl::Status Copy(int32_t layer, Kind kind, KvHead head, int64_t* bytes, Sha256* sha = nullptr) {
    ASSIGN_OR_RETURN(const uint32_t count, from_.SegmentCount(layer, kind, head));
    for (uint32_t i = 0; i < count; ++i) {
      ASSIGN_OR_RETURN(const auto segment, from_.Segment(layer, kind, head, i));
      const absl::string_view payload = segment->payload();
      RETURN_IF_ERROR(segment->Verify(0, static_cast<int64_t>(payload.size())));
      RETURN_IF_ERROR(writer_->Add({to_, layer, kind, head, i}, payload, segment->dtype()));
      if (sha != nullptr) sha->Update(payload);
      *bytes += static_cast<int64_t>(payload.size());
      ++added_;
    }
    return absl::OkStatus();
  }

  absl::Status CopyTokenIds() {
    RETURN_IF_ERROR(Begin("context"));
    Sha256 sha;
    int64_t bytes = 0;
    RETURN_IF_ERROR(Copy(-1, Kind::kTokenIds, KvHead(0), &bytes, &sha));
    const std::string found = sha.FinishHex();
    if (!manifest_.token_ids_sha256().empty() && found != manifest_.token_ids_sha256()) {
      return absl::DataLossError(absl::StrCat("context ", manifest_.name(), ": ", bytes / 4,
                                              " token ids with SHA-256 ", found,
                                              ", the manifest has ", manifest_.token_ids_sha256()));
    }
    return End();
  }

  absl::Status CopyLayer(int32_t layer) {
    RETURN_IF_ERROR(Begin(absl::StrCat("layer-", layer)));
    v1::LayerSizes wanted;
    for (const v1::LayerSizes& sizes : manifest_.layer_sizes()) {
      if (static_cast<int64_t>(sizes.layer()) == layer) wanted = sizes;
    }
    const int64_t row_bytes = int64_t{2} * manifest_.head_dim() * manifest_.kv_heads();
    const std::pair<Kind, int64_t> kinds[] = {{Kind::kKeyRows, manifest_.tokens() * row_bytes},
                                              {Kind::kValueRows, manifest_.tokens() * row_bytes},
                                              {Kind::kSampledQueries, wanted.sampled_query_bytes()},
                                              {Kind::kIndex, wanted.index_bytes()},
                                              {Kind::kSummaries, wanted.summary_bytes()},
                                              {Kind::kQueryDrift, wanted.query_drift_bytes()}};
    for (const auto& [kind, expected] : kinds) {
      int64_t bytes = 0;
      const bool of_layer = kind == Kind::kQueryDrift;
      const auto heads = of_layer ? 1 : static_cast<int32_t>(manifest_.kv_heads());
      for (int32_t head = 0; head < heads; ++head) {
        RETURN_IF_ERROR(Copy(layer, kind, KvHead(head), &bytes));
      }
      // 0: the manifest does not say.
      if (expected > 0 && bytes != expected) {
        return absl::DataLossError(absl::StrCat("context ", manifest_.name(), ": layer ", layer,
                                                " has ", bytes, " bytes of ", KindName(kind),
                                                ", by its manifest there are ", expected));
      }
    }
    return End();
  }

  const StoredContext& from_;
  const v1::Manifest& manifest_;
  const ContextId to_;
  const std::string folder_;
  std::vector<std::string> paths_;
  std::unique_ptr<SstWriter> writer_;
  int64_t added_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<std::string>> CopyContext(const StoredContext& from, ContextId to,
                                                     const std::string& folder,
                                                     absl::FunctionRef<void(double)> progress) {
  return Copier(from, to, folder).Run(progress);
}

}  // namespace carrel::kvstore
