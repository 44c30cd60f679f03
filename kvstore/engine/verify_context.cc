#include "kvstore/engine/verify_context.h"

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/index_type.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

class Verifier {
 public:
  Verifier(const StoredContext& context, bool deep, const std::function<bool()>& cancelled)
      : context_(context), manifest_(context.manifest()), deep_(deep), cancelled_(cancelled) {}

  absl::StatusOr<VerifyReport> Run() {
    Note(CheckManifest(manifest_), "manifest");
    if (report_.error_count > 0) return std::move(report_);  // nothing is to be made of it
    absl::StatusOr<std::vector<IndexParams>> params = HeadIndexParamsOf(manifest_);
    Note(params.status(), "manifest");
    Note(TokenIds(), "token ids");
    const auto layers = static_cast<int32_t>(manifest_.layers());
    const auto heads = static_cast<int32_t>(manifest_.kv_heads());
    for (int32_t layer = 0; layer < layers; ++layer) {
      for (int32_t head = 0; head < heads; ++head) {
        if (cancelled_()) return absl::CancelledError("verify: nobody waits for it any more");
        RETURN_IF_ERROR(lacking_);
        const IndexParams* of_head =
            params.ok() ? &(*params)[static_cast<size_t>(layer) * heads + head] : nullptr;
        Head(Layer(layer), KvHead(head), of_head);
      }
      Note(Segments(layer, Kind::kQueryDrift, KvHead(0)), "");
      Note(ReadQueryDrift(context_, Layer(layer)).status(), "");
      context_.ReleasePages(layer);
    }
    RETURN_IF_ERROR(lacking_);
    return std::move(report_);
  }

 private:
  // What is found wrong counts once, though several readers meet it.
  void Note(const absl::Status& status, absl::string_view what) {
    if (status.ok()) return;
    // Memory or descriptors that this process lacks say nothing of the context.
    if (absl::IsResourceExhausted(status)) return lacking_.Update(status);
    std::string message = absl::StrCat(what, what.empty() ? "" : ": ", status.message());
    for (const std::string& known : report_.errors) {
      if (known == message) return;
    }
    ++report_.error_count;
    if (static_cast<int64_t>(report_.errors.size()) < VerifyReport::kMostErrors) {
      report_.errors.push_back(std::move(message));
    }
  }

  // Opens all segments of a kind and head: footer, table, digest; deep: payload.
  absl::Status Segments(int32_t layer, Kind kind, KvHead head) {
    ASSIGN_OR_RETURN(const uint32_t count, context_.SegmentCount(layer, kind, head));
    absl::Status first;
    for (uint32_t i = 0; i < count; ++i) {
      const auto segment = context_.Segment(layer, kind, head, i);
      ++report_.segments;
      if (!segment.ok()) {
        first.Update(segment.status());
        continue;
      }
      if (!deep_) continue;
      const auto bytes = static_cast<int64_t>((*segment)->payload().size());
      const absl::Status status = (*segment)->Verify(0, bytes);
      first.Update(status);
      report_.bytes += status.ok() ? bytes : 0;
    }
    return first;
  }

  absl::Status TokenIds() {
    ASSIGN_OR_RETURN(const uint32_t count, context_.SegmentCount(-1, Kind::kTokenIds, KvHead(0)));
    Sha256 sha;
    int64_t bytes = 0;
    for (uint32_t i = 0; i < count; ++i) {
      ++report_.segments;
      ASSIGN_OR_RETURN(const auto segment, context_.Segment(-1, Kind::kTokenIds, KvHead(0), i));
      const absl::string_view payload = segment->payload();
      RETURN_IF_ERROR(segment->Verify(0, static_cast<int64_t>(payload.size())));
      sha.Update(payload);
      bytes += static_cast<int64_t>(payload.size());
    }
    report_.bytes += bytes;
    if (manifest_.token_ids_sha256().empty()) return absl::OkStatus();  // not made by prefill
    const std::string found = sha.FinishHex();
    if (found == manifest_.token_ids_sha256()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("context ", manifest_.name(), ": ", bytes / 4,
                                            " ids with SHA-256 ", found, ", the manifest has ",
                                            manifest_.token_ids_sha256()));
  }

  void Head(Layer layer, KvHead head, const IndexParams* params) {
    const std::string place = absl::StrCat("context ", manifest_.name(), " layer ", layer.value(),
                                           " kv_head ", head.value());
    for (const Kind kind : {Kind::kKeyRows, Kind::kValueRows, Kind::kSampledQueries, Kind::kIndex,
                            Kind::kSummaries}) {
      Note(Segments(layer.value(), kind, head), "");
    }
    const absl::StatusOr<Rows> keys = Rows::OpenKeys(context_, layer, head);
    Note(keys.status(), "");
    Note(Rows::OpenValues(context_, layer, head).status(), "");
    if (deep_) {
      const absl::Status queries = ReadSampledQueries(context_, layer, head).status();
      if (!absl::IsNotFound(queries)) Note(queries, "");
    }
    if (manifest_.summary_rows() > 0) Note(OpenSummaries(layer, head), place);
    if (keys.ok() && params != nullptr) Note(OpenHeadIndex(layer, head, *params, *keys), place);
  }

  absl::Status OpenSummaries(Layer layer, KvHead head) const {
    ASSIGN_OR_RETURN(Blob blob, Blob::Open(context_, layer, Kind::kSummaries, head));
    if (blob.empty()) return absl::DataLossError("summaries are missing");
    if (!deep_) return absl::OkStatus();
    return Summaries::Open(std::move(blob), manifest_.tokens(), manifest_.head_dim()).status();
  }

  absl::Status OpenHeadIndex(Layer layer, KvHead head, const IndexParams& params,
                             const Rows& keys) const {
    if (IndexTypeOf(params.kind).exact()) return absl::OkStatus();
    ASSIGN_OR_RETURN(Blob blob, Blob::Open(context_, layer, Kind::kIndex, head));
    if (blob.empty()) return absl::DataLossError("the index is missing");
    if (!deep_) return absl::OkStatus();
    return OpenIndex(params, std::move(blob), keys).status();
  }

  const StoredContext& context_;
  const v1::Manifest& manifest_;
  const bool deep_;
  const std::function<bool()>& cancelled_;
  VerifyReport report_;
  absl::Status lacking_;
};

}  // namespace

absl::StatusOr<VerifyReport> VerifyContext(const StoredContext& context, bool deep,
                                           const std::function<bool()>& cancelled) {
  return Verifier(context, deep, cancelled).Run();
}

}  // namespace carrel::kvstore
