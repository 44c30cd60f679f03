#include "kvstore/index/rows/stored_queries.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

int64_t BytesOf(const v1::Manifest& manifest, Layer layer) {
  for (const v1::LayerSizes& sizes : manifest.layer_sizes()) {
    if (sizes.layer() == static_cast<uint32_t>(layer.value())) return sizes.query_drift_bytes();
  }
  return 0;
}

}  // namespace

absl::StatusOr<SampledQueries> ReadSampledQueries(const StoredContext& context, Layer layer,
                                                  KvHead kv_head) {
  const v1::Manifest& m = context.manifest();
  const std::string where =
      absl::StrCat("sampled queries (context=", m.name(), " layer=", layer.value(),
                   " kv_head=", kv_head.value(), ")");
  ASSIGN_OR_RETURN(const Blob blob, Blob::Open(context, layer, Kind::kSampledQueries, kv_head));
  if (blob.empty()) return absl::NotFoundError(absl::StrCat(where, ": none are stored"));
  ASSIGN_OR_RETURN(const std::string payload, blob.Read());
  absl::StatusOr<SampledQueries> queries = DecodeSampledQueries(payload);
  if (!queries.ok()) return Annotate(queries.status(), where);
  const bool fits = m.kv_heads() > 0 && queries->group == m.q_heads() / m.kv_heads() &&
                    queries->head_dim == m.head_dim() &&
                    (queries->samples() == 0 || queries->positions.back() < m.tokens());
  if (fits) return queries;
  return absl::DataLossError(absl::StrCat(where, ": group=", queries->group, " head_dim=",
                                          queries->head_dim, " do not fit the manifest"));
}

absl::StatusOr<std::vector<float>> ReadQueryDrift(const StoredContext& context, Layer layer) {
  const v1::Manifest& m = context.manifest();
  const int64_t bytes = BytesOf(m, layer);
  if (bytes == 0) return std::vector<float>();
  const std::string where =
      absl::StrCat("query drift (context=", m.name(), " layer=", layer.value(), ")");
  const auto segment = context.Segment(layer.value(), Kind::kQueryDrift, KvHead(0), 0);
  if (absl::IsNotFound(segment.status())) {
    return absl::DataLossError(
        absl::StrCat(where, ": missing, the manifest says ", bytes, " bytes"));
  }
  RETURN_IF_ERROR(segment.status());
  const absl::string_view payload = (*segment)->payload();
  const int64_t floats = int64_t{m.q_heads()} * m.head_dim();
  if (static_cast<int64_t>(payload.size()) != floats * 4 ||
      (*segment)->dtype() != static_cast<uint8_t>(DType::kF32)) {
    return absl::DataLossError(absl::StrCat(where, ": ", payload.size(), " bytes of dtype ",
                                            (*segment)->dtype(), ", must be ", floats, " floats"));
  }
  RETURN_IF_ERROR((*segment)->Verify(0, static_cast<int64_t>(payload.size())));
  std::vector<float> drift(static_cast<size_t>(floats));
  std::memcpy(drift.data(), payload.data(), payload.size());
  if (std::all_of(drift.begin(), drift.end(), [](float x) { return std::isfinite(x); })) {
    return drift;
  }
  return absl::DataLossError(absl::StrCat(where, ": not finite"));
}

}  // namespace carrel::kvstore
