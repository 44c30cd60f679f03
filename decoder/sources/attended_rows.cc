#include "decoder/sources/attended_rows.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "retrieval/session.h"

namespace carrel::decoder {
namespace {

struct Block {
  Layer layer;
  int64_t first = 0, tokens = 0;  // of the trace
};

absl::Status AddPiece(const retrieval::Piece& piece, const QueryTrace& trace, const Block& block,
                      const AttentionShape& shape, RowRange zone, std::vector<AttendedRow>& rows) {
  const int64_t group = shape.group(), count = static_cast<int64_t>(piece.ids.size());
  if (piece.token >= block.tokens || piece.kv_head.value() >= shape.kv_heads ||
      static_cast<int64_t>(piece.scores.size()) != group * count) {
    return absl::DataLossError(absl::StrCat("reply: token ", piece.token, " kv_head ",
                                            piece.kv_head.value(), " was not asked for, or has ",
                                            piece.scores.size(), " scores of ", count, " rows"));
  }
  const int64_t token = block.first + piece.token;
  for (int64_t h = 0; h < group; ++h) {
    const int64_t q_head = piece.kv_head.value() * group + h;
    const float lse = trace.lse(block.layer)[token * shape.q_heads + q_head];
    for (int64_t j = 0; j < count; ++j) {
      const Position position = piece.ids[static_cast<size_t>(j)];
      if (position < zone.begin || position >= zone.end) {
        return absl::DataLossError(absl::StrCat("reply: row ", position, " is outside the zone [",
                                                zone.begin, ", ", zone.end, ")"));
      }
      const float score = piece.scores[static_cast<size_t>(h * count + j)];
      const float share = std::min(1.0f, std::exp(score - lse));
      if (!(share >= kLeastShare)) continue;
      rows.push_back({block.layer.value(), static_cast<int32_t>(q_head),
                      static_cast<int32_t>(trace.steps()[token]), position, share});
    }
  }
  return absl::OkStatus();
}

// Of rows of `width` floats the first, third, ..
void KeepEveryOther(std::vector<float>& values, size_t width) {
  const size_t rows = values.size() / width;
  for (size_t i = 1; 2 * i < rows; ++i) {
    std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(2 * i * width), width,
                values.begin() + static_cast<std::ptrdiff_t>(i * width));
  }
  values.resize((rows + 1) / 2 * width);
}

}  // namespace

QueryTrace::QueryTrace(const AttentionShape& shape) : shape_(shape), layers_(shape.layers) {}

bool QueryTrace::BeginBlock(bool keep) {
  keeping_ = false;
  if (!keep) return false;
  const int64_t step = seen_++;
  if (step % stride_ != 0) return false;
  if (tokens() == kMaxTokens) DropEveryOther();
  if (step % stride_ != 0) return false;
  steps_.push_back(step);
  keeping_ = true;
  return true;
}

void QueryTrace::DropEveryOther() {
  stride_ *= 2;
  const auto heads = static_cast<size_t>(shape_.q_heads);
  for (Kept& layer : layers_) {
    KeepEveryOther(layer.q, heads * static_cast<size_t>(shape_.head_dim));
    KeepEveryOther(layer.lse, heads);
  }
  for (size_t i = 1; 2 * i < steps_.size(); ++i) steps_[i] = steps_[2 * i];
  steps_.resize((steps_.size() + 1) / 2);
}

void QueryTrace::Add(Layer layer, const float* q, const float* lse, int64_t n) {
  if (!keeping_ || n == 0) return;
  const int64_t heads = shape_.q_heads, floats = heads * shape_.head_dim;
  Kept& kept = layers_[layer.value()];
  kept.q.insert(kept.q.end(), q + (n - 1) * floats, q + n * floats);
  kept.lse.insert(kept.lse.end(), lse + (n - 1) * heads, lse + n * heads);
}

absl::Status AttendedInZone(const QueryTrace& trace, Layer layer, const AttentionShape& shape,
                            const ZoneLimits& limits, retrieval::Session* client,
                            std::vector<AttendedRow>& rows) {
  const RowRange zone = limits.zone;
  if (zone.rows() == 0 || !trace.has(layer)) return absl::OkStatus();
  const int64_t top_k = std::min({kRowsPerToken, zone.rows(), limits.max_top_k});
  const int64_t token_bytes = shape.kv_heads * top_k * (8 + 4 * shape.group());
  const int64_t most = std::clamp<int64_t>(limits.max_result_bytes / 4 / token_bytes, 1,
                                           std::max<int64_t>(1, limits.max_query_tokens));
  for (Block block = {layer}; block.first < trace.tokens(); block.first += block.tokens) {
    block.tokens = std::min(most, trace.tokens() - block.first);
    const float* const q = trace.q(layer) + block.first * shape.q_heads * shape.head_dim;
    retrieval::Query query;
    query.layer = layer;
    query.tokens = block.tokens;
    query.queries.assign(q, q + block.tokens * shape.q_heads * shape.head_dim);
    query.selection = select::TopK{top_k};
    ASSIGN_OR_RETURN(const retrieval::RequestId id, client->Send(std::move(query)));
    for (bool last = false; !last;) {
      ASSIGN_OR_RETURN(const retrieval::Part part, client->Next(id));
      last = part.last;
      for (const retrieval::Piece& piece : part.pieces) {
        absl::Status added = AddPiece(piece, trace, block, shape, zone, rows);
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
