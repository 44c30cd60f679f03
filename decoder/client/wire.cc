#include "decoder/client/wire.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_join.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"

namespace carrel::decoder {
namespace {

using retrieval::Part;
using retrieval::Piece;
using retrieval::Want;

absl::Status Check(const v1::Tensor& tensor, v1::Tensor::DType dtype, int64_t element_bytes,
                   absl::Span<const int64_t> shape, absl::string_view what) {
  bool fits = tensor.dtype() == dtype && tensor.shape_size() == static_cast<int>(shape.size());
  int64_t elements = 1;
  for (int i = 0; fits && i < tensor.shape_size(); ++i) {
    const int64_t size = tensor.shape(i);
    fits = size >= 0 && size <= (int64_t{1} << 40) && (shape[i] == -1 || shape[i] == size) &&
           !__builtin_mul_overflow(elements, size, &elements);
  }
  fits = fits && static_cast<int64_t>(tensor.data().size()) == elements * element_bytes;
  if (fits) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "reply: ", what, " is ", v1::Tensor::DType_Name(tensor.dtype()), " [",
      absl::StrJoin(tensor.shape(), ", "), "] of ", tensor.data().size(), " bytes, expected ",
      v1::Tensor::DType_Name(dtype), " [", absl::StrJoin(shape, ", "), "]"));
}

v1::Want ToWire(Want want) {
  static_assert(v1::ATTEND - v1::IDS == static_cast<int>(Want::kAttend));  // in the same order
  return static_cast<v1::Want>(v1::IDS + static_cast<int>(want));
}

void SetSelection(const select::Selection& selection, v1::Query& query) {
  v1::Select& select = *query.mutable_select();
  if (select::IsAll(selection)) select.set_all(true);
  if (const auto* top_k = std::get_if<select::TopK>(&selection)) {
    select.set_top_k(top_k->rows);
    query.mutable_head_top_k()->Assign(top_k->of_head.begin(), top_k->of_head.end());
  }
  if (const auto* range = std::get_if<select::Range>(&selection)) {
    select.set_range(range->below);
    select.set_max_rows(range->max_rows);
  }
  if (const auto* mass = std::get_if<select::Mass>(&selection)) {
    select.set_mass(mass->share);
    select.set_max_rows(mass->max_rows);
  }
}

int64_t Dimension(const v1::Tensor& tensor, int i) {
  return i < tensor.shape_size() ? tensor.shape(i) : 0;
}

// Numbers of the reply become pieces' of its part.
class PartBuilder {
 public:
  PartBuilder(const AttentionShape& shape, Part* part)
      : group_(shape.kv_heads > 0 ? shape.group() : 0), d_(shape.head_dim), part_(*part) {}

  absl::Status Add(const v1::QueryReply& reply) {
    part_.pieces.reserve(static_cast<size_t>(reply.heads_size()));
    size_t bytes = 0;
    for (const v1::HeadResult& head : reply.heads()) {
      bytes += head.out().data().size() + head.lse().data().size() + head.rest().data().size() +
               head.zone_lse().data().size();
    }
    part_.floats.reserve(bytes / sizeof(float));  // spans into it stay
    for (const v1::HeadResult& head : reply.heads()) RETURN_IF_ERROR(AddHead(head));
    const v1::QueryStatistics& statistics = reply.statistics();
    part_.statistics = {.candidates = statistics.candidates(),
                        .visited = statistics.visited(),
                        .queue_us = statistics.queue_us(),
                        .search_us = statistics.search_us(),
                        .rows = statistics.rows()};
    return absl::OkStatus();
  }

  absl::Status Add(const v1::FetchRowsReply& reply) {
    for (const v1::FetchRowsReply::RowBlock& block : reply.blocks()) {
      Piece& piece = AddPiece(0, block.kv_head());
      piece.first_row = block.first();
      RETURN_IF_ERROR(Point(block.k(), "K rows", piece.k));
      RETURN_IF_ERROR(Point(block.v(), "V rows", piece.v));
      piece.rows = static_cast<int64_t>(piece.k.size());
    }
    return absl::OkStatus();
  }

 private:
  Piece& AddPiece(int64_t token, uint32_t kv_head) {
    Piece& piece = part_.pieces.emplace_back();
    piece.token = token;
    // What does not fit becomes one that nobody asked for.
    constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();
    piece.kv_head = KvHead(static_cast<int32_t>(std::min(kv_head, kMost)));
    return piece;
  }

  absl::Status AddHead(const v1::HeadResult& head) {
    Piece& piece = AddPiece(head.token(), head.kv_head());
    if (head.has_ids()) {
      piece.rows = Dimension(head.ids(), 0);
      RETURN_IF_ERROR(Check(head.ids(), v1::Tensor::I64, 8, {piece.rows}, "ids"));
      piece.ids.resize(static_cast<size_t>(piece.rows));
      std::memcpy(piece.ids.data(), head.ids().data().data(), head.ids().data().size());
    }
    if (head.has_scores()) {
      RETURN_IF_ERROR(CheckFloats(head.scores(), {group_, piece.rows}, "scores"));
      piece.scores.resize(head.scores().data().size() / sizeof(float));
      std::memcpy(piece.scores.data(), head.scores().data().data(), head.scores().data().size());
    }
    if (head.has_k()) RETURN_IF_ERROR(Point(head.k(), "K rows", piece.k));
    if (head.has_v()) RETURN_IF_ERROR(Point(head.v(), "V rows", piece.v));
    if (head.has_out()) RETURN_IF_ERROR(Take(head.out(), {group_, d_}, "out", piece.out));
    if (head.has_lse()) RETURN_IF_ERROR(Take(head.lse(), {group_}, "lse", piece.lse));
    if (head.has_zone_lse())
      RETURN_IF_ERROR(Take(head.zone_lse(), {group_}, "zone_lse", piece.zone_lse));
    if (head.has_rest()) RETURN_IF_ERROR(Take(head.rest(), {group_, 1 + d_}, "rest", piece.rest));
    return absl::OkStatus();
  }

  // Which need not be aligned inside the message.
  absl::Status Take(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                    absl::string_view what, absl::Span<const float>& to) {
    RETURN_IF_ERROR(CheckFloats(tensor, shape, what));
    const size_t before = part_.floats.size(), count = tensor.data().size() / sizeof(float);
    part_.floats.resize(before + count);
    std::memcpy(part_.floats.data() + before, tensor.data().data(), count * sizeof(float));
    to = {part_.floats.data() + before, count};
    return absl::OkStatus();
  }

  absl::Status Point(const v1::Tensor& tensor, absl::string_view what,
                     std::vector<const void*>& rows) const {
    const int64_t count = Dimension(tensor, 0);
    RETURN_IF_ERROR(Check(tensor, v1::Tensor::BF16, 2, {count, d_}, what));
    rows.resize(static_cast<size_t>(count));
    for (size_t i = 0; i < rows.size(); ++i)
      rows[i] = tensor.data().data() + i * static_cast<size_t>(d_) * 2;
    return absl::OkStatus();
  }

  const int64_t group_, d_;
  Part& part_;
};

}  // namespace

absl::Status CheckFloats(const v1::Tensor& tensor, absl::Span<const int64_t> shape,
                         absl::string_view what) {
  return Check(tensor, v1::Tensor::F32, 4, shape, what);
}

void ToWire(const retrieval::OpenRequest& open, v1::Open& wire) {
  wire.set_context(open.context);
  wire.set_content_id(open.content_id);
  for (const auto& [name, value] : open.fingerprint) {
    v1::Fingerprint::Field& field = *wire.mutable_fingerprint()->add_fields();
    field.set_name(name);
    field.set_value(value);
  }
  wire.set_sink(open.sink);
  wire.set_local(open.local);
  wire.set_query_drift(open.query_drift);
}

void ToWire(const retrieval::Query& query, const AttentionShape& shape, v1::Query& wire) {
  wire.set_layer(static_cast<uint32_t>(query.layer.value()));
  v1::Tensor& queries = *wire.mutable_queries();
  queries.set_dtype(v1::Tensor::F32);
  for (const int64_t size : {query.tokens, int64_t{shape.q_heads}, int64_t{shape.head_dim}})
    queries.add_shape(size);
  queries.set_data(query.queries.data(), query.queries.size() * sizeof(float));
  SetSelection(query.selection, wire);
  wire.set_want(ToWire(query.want));
  wire.set_speculative(query.speculative);
  wire.set_among_candidates_of(query.among_candidates_of);
  wire.set_measure_mass(query.measure_mass);
  wire.set_effort(static_cast<uint32_t>(query.effort));
  wire.set_estimate(query.estimate);
  for (size_t head = 0; head < query.held.size(); ++head) {
    if (query.held[head].empty()) continue;
    v1::HeldRows& rows = *wire.add_held();
    rows.set_kv_head(static_cast<uint32_t>(head));
    Position last = 0;
    for (const Position id : query.held[head]) {
      rows.add_steps(static_cast<uint64_t>(id - last));
      last = id;
    }
  }
}

void ToWire(const retrieval::Fetch& fetch, v1::FetchRows& wire) {
  wire.set_layer(static_cast<uint32_t>(fetch.layer.value()));
  for (const KvHead head : fetch.kv_heads) wire.add_kv_heads(static_cast<uint32_t>(head.value()));
  if (fetch.by_ids) {
    wire.mutable_ids()->mutable_id()->Assign(fetch.ids.begin(), fetch.ids.end());
  } else {
    wire.mutable_range()->set_begin(fetch.range.begin);
    wire.mutable_range()->set_end(fetch.range.end);
  }
}

retrieval::ContextFacts FactsOf(const v1::Manifest& manifest) {
  retrieval::ContextFacts facts;
  facts.name = manifest.name();
  facts.content_id = manifest.content_id();
  facts.shape = {.layers = static_cast<int32_t>(manifest.layers()),
                 .q_heads = static_cast<int32_t>(manifest.q_heads()),
                 .kv_heads = static_cast<int32_t>(manifest.kv_heads()),
                 .head_dim = static_cast<int32_t>(manifest.head_dim())};
  facts.tokens = manifest.tokens();
  facts.summary_rows = manifest.summary_rows();
  for (const v1::HeadFidelity& from : manifest.head_fidelity()) {
    retrieval::HeadFidelity& to = facts.fidelity.emplace_back();
    to.layer = from.layer();
    to.kv_head = from.kv_head();
    to.output = from.output();
    to.rows.assign(from.rows().begin(), from.rows().end());
    to.error.assign(from.error().begin(), from.error().end());
    to.error_without.assign(from.error_without().begin(), from.error_without().end());
    to.probed = from.probe_queries() > 0;
  }
  return facts;
}

absl::StatusOr<retrieval::Opened> OpenedFromWire(const v1::OpenReply& wire) {
  retrieval::Opened opened;
  opened.context = FactsOf(wire.manifest());
  opened.context.tokens = wire.tokens();
  opened.zone = {wire.zone_begin(), wire.zone_end()};
  opened.limits = {.max_top_k = wire.limits().max_top_k(),
                   .max_query_tokens = wire.limits().max_query_tokens(),
                   .max_fetch_rows = wire.limits().max_fetch_rows(),
                   .max_candidate_sets = wire.limits().max_candidate_sets(),
                   .max_result_bytes = wire.limits().max_result_bytes()};
  opened.layer_entropy_nats.assign(wire.layer_entropy_nats().begin(),
                                   wire.layer_entropy_nats().end());
  const AttentionShape& shape = opened.context.shape;
  for (const v1::Tensor& tensor : wire.query_drift()) {
    std::vector<float>& drift = opened.query_drift.emplace_back();
    if (tensor.data().empty()) continue;
    RETURN_IF_ERROR(CheckFloats(tensor, {shape.q_heads, shape.head_dim}, "query drift"));
    drift.resize(tensor.data().size() / sizeof(float));
    std::memcpy(drift.data(), tensor.data().data(), tensor.data().size());
  }
  opened.manifest = wire.manifest().SerializeAsString();
  return opened;
}

absl::StatusOr<Part> PartFromWire(v1::SessionReply wire, const AttentionShape& shape,
                                  absl::string_view what) {
  if (wire.has_error()) {
    const auto code = static_cast<absl::StatusCode>(wire.error().code());
    return absl::Status(code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
                        absl::StrCat(what, ": ", wire.error().message()));
  }
  wire.clear_request_id();  // of a session, which may break and begin anew
  Part part;
  part.last = wire.last();
  part.bytes = static_cast<int64_t>(wire.ByteSizeLong());
  auto kept = std::make_shared<const v1::SessionReply>(std::move(wire));
  PartBuilder builder(shape, &part);
  RETURN_IF_ERROR(kept->has_fetch_rows() ? builder.Add(kept->fetch_rows())
                                         : builder.Add(kept->query()));
  part.rows = std::move(kept);
  return part;
}

}  // namespace carrel::decoder
