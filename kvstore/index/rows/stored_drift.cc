#include "kvstore/index/rows/stored_drift.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
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
