#include "kvstore/index/rows/stored_queries.h"

#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

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

}  // namespace carrel::kvstore
