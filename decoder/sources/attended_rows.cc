#include "decoder/sources/attended_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"
#include "decoder/client/store_client.h"
#include "decoder/client/wire.h"

namespace carrel::decoder {
namespace {

struct Block {
  Layer layer;
  int64_t first = 0, tokens = 0;  // of the trace
};

absl::Status AddHead(const v1::HeadResult& head, const QueryTrace& trace, const Block& block,
                     const AttentionShape& shape, RowRange zone, std::vector<AttendedRow>& rows) {
  if (head.token() >= block.tokens || head.kv_head() >= static_cast<uint32_t>(shape.kv_heads)) {
    return absl::DataLossError(absl::StrCat("reply: token ", head.token(), " kv_head ",
                                            head.kv_head(), " was not asked for"));
  }
  const int64_t group = shape.group(), count = Dimension(head.ids(), 0);
  RETURN_IF_ERROR(CheckIds(head.ids(), {count}, "ids"));
  RETURN_IF_ERROR(CheckFloats(head.scores(), {group, count}, "scores"));
  const int64_t token = block.first + head.token();
  for (int64_t h = 0; h < group; ++h) {
    const int64_t q_head = head.kv_head() * group + h;
    const float lse = trace.lse(block.layer)[token * shape.q_heads + q_head];
    for (int64_t j = 0; j < count; ++j) {
      Position position;
      float score;
      std::memcpy(&position, head.ids().data().data() + j * sizeof(position), sizeof(position));
      std::memcpy(&score, head.scores().data().data() + (h * count + j) * sizeof(score),
                  sizeof(score));
      if (position < zone.begin || position >= zone.end) {
        return absl::DataLossError(absl::StrCat("reply: row ", position, " is outside the zone [",
                                                zone.begin, ", ", zone.end, ")"));
      }
      const float share = std::min(1.0f, std::exp(score - lse));
      if (!(share >= kLeastShare)) continue;
      rows.push_back({block.layer.value(), static_cast<int32_t>(q_head),
                      static_cast<int32_t>(trace.steps()[token]), position, share});
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AttendedInZone(const QueryTrace& trace, Layer layer, const AttentionShape& shape,
                            const ZoneLimits& limits, StoreClient* client,
                            std::vector<AttendedRow>& rows) {
  const RowRange zone = limits.zone;
  if (zone.rows() == 0 || !trace.has(layer)) return absl::OkStatus();
  const int64_t top_k = std::min({kRowsPerToken, zone.rows(), limits.max_top_k});
  const int64_t token_bytes = shape.kv_heads * top_k * (8 + 4 * shape.group());
  const int64_t most = std::clamp<int64_t>(limits.max_result_bytes / 4 / token_bytes, 1,
                                           std::max<int64_t>(1, limits.max_query_tokens));
  for (Block block = {layer}; block.first < trace.tokens(); block.first += block.tokens) {
    block.tokens = std::min(most, trace.tokens() - block.first);
    v1::Query query;
    query.set_layer(layer.value());
    SetFloats(trace.q(layer) + block.first * shape.q_heads * shape.head_dim,
              {block.tokens, shape.q_heads, shape.head_dim}, query.mutable_queries());
    query.mutable_select()->set_top_k(top_k);
    query.set_want(v1::IDS);
    ASSIGN_OR_RETURN(const RequestId id, client->Send(std::move(query)));
    for (bool last = false; !last;) {
      ASSIGN_OR_RETURN(const v1::SessionReply reply, client->Next(id));
      last = reply.last();
      for (const v1::HeadResult& head : reply.query().heads()) {
        absl::Status added = AddHead(head, trace, block, shape, zone, rows);
        if (added.ok()) continue;
        if (!last) client->Forget(id);
        return added;
      }
    }
  }
  return absl::OkStatus();
}

void AttendedHere(const QueryTrace& trace, Layer layer, KvHead head, const AttentionShape& shape,
                  Position first, int64_t count, const float* k, std::vector<AttendedRow>& rows) {
  if (!trace.has(layer)) return;
  const int64_t d = shape.head_dim, group = shape.group();
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  for (int64_t token = 0; token < trace.tokens(); ++token) {
    for (int64_t q_head = head.value() * group; q_head < (head.value() + 1) * group; ++q_head) {
      const int64_t at = token * shape.q_heads + q_head;
      const float* q = trace.q(layer) + at * d;
      const float lse = trace.lse(layer)[at];
      for (int64_t j = 0; j < count; ++j) {
        const float score = scale * std::inner_product(q, q + d, k + j * d, 0.0f);
        const float share = std::min(1.0f, std::exp(score - lse));
        if (!(share >= kLeastShare)) continue;
        rows.push_back({layer.value(), static_cast<int32_t>(q_head),
                        static_cast<int32_t>(trace.steps()[token]), first + j, share});
      }
    }
  }
}

}  // namespace carrel::decoder
