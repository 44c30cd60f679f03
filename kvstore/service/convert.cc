#include "kvstore/service/convert.h"

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "carrel/v1/context.pb.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

// A shape is the client's to choose: an error shows its first sizes.
std::string Shape(const v1::Tensor& tensor) {
  constexpr int kShown = 8;
  std::vector<int64_t> sizes(tensor.shape().begin(),
                             tensor.shape().begin() + std::min(kShown, tensor.shape_size()));
  return absl::StrCat("[", absl::StrJoin(sizes, ", "),
                      tensor.shape_size() > kShown ? ", ...]" : "]");
}

std::string Where(const OpenContext& context, int64_t layer) {
  return absl::StrCat(" (context=", context.name(), " layer=", layer, ")");
}

Layer LayerFromWire(uint32_t layer) {
  // What does not fit becomes one that validation refuses.
  constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();
  return Layer(static_cast<int32_t>(std::min(layer, kMost)));
}

absl::Status QueriesFromWire(const v1::Tensor& tensor, const OpenContext& context, int64_t layer,
                             QueryRequest& request) {
  const AttentionShape& shape = context.shape();
  const auto refuse = [&](auto... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat("query: queries ", parts..., Where(context, layer)));
  };
  if (tensor.dtype() != v1::Tensor::F32) {
    const std::string name = v1::Tensor::DType_IsValid(tensor.dtype())
                                 ? v1::Tensor::DType_Name(tensor.dtype())
                                 : absl::StrCat("dtype ", static_cast<int>(tensor.dtype()));
    return refuse("are ", name, ", expected F32");
  }
  if (tensor.shape_size() != 3 || tensor.shape(1) != shape.q_heads ||
      tensor.shape(2) != shape.head_dim) {
    return refuse("have shape ", Shape(tensor), ", expected [tokens, ", shape.q_heads, ", ",
                  shape.head_dim, "]");
  }
  const int64_t tokens = tensor.shape(0);
  const int64_t token_bytes = int64_t{4} * shape.q_heads * shape.head_dim;
  const int64_t bytes = static_cast<int64_t>(tensor.data().size());
  if (tokens < 0 || tokens > bytes / token_bytes || tokens * token_bytes != bytes) {
    return refuse("of shape ", Shape(tensor), " have ", bytes, " bytes, expected ", token_bytes,
                  " per token");
  }
  request.tokens = tokens;
  request.queries.resize(static_cast<size_t>(bytes) / sizeof(float));
  if (bytes > 0) std::memcpy(request.queries.data(), tensor.data().data(), tensor.data().size());
  return absl::OkStatus();
}

std::string* Header(v1::Tensor::DType dtype, std::initializer_list<int64_t> shape,
                    v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  for (int64_t size : shape) tensor->add_shape(size);
  return tensor->mutable_data();
}

void Floats(absl::Span<const float> values, std::initializer_list<int64_t> shape,
            v1::Tensor* tensor) {
  Header(v1::Tensor::F32, shape, tensor)
      ->assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

void RowsToWire(absl::Span<const void* const> rows, int64_t head_dim, v1::Tensor* tensor) {
  std::string* data =
      Header(v1::Tensor::BF16, {static_cast<int64_t>(rows.size()), head_dim}, tensor);
  const size_t row_bytes = static_cast<size_t>(head_dim) * 2;
  data->reserve(rows.size() * row_bytes);
  for (size_t i = 0; i < rows.size();) {
    // Rows that follow one another in memory are copied at once.
    const char* begin = static_cast<const char*>(rows[i]);
    size_t count = 1;
    while (i + count < rows.size() && rows[i + count] == begin + count * row_bytes) ++count;
    data->append(begin, count * row_bytes);
    i += count;
  }
}

void PieceToWire(const Piece& piece, const ReplyFormat& format, v1::HeadResult* head) {
  const int64_t rows = piece.rows, group = format.shape.group(), d = format.shape.head_dim;
  head->set_token(static_cast<uint32_t>(piece.token));
  head->set_kv_head(static_cast<uint32_t>(piece.kv_head.value()));
  if (format.want == Want::kAttend) {
    Floats(piece.out, {group, d}, head->mutable_out());
    Floats(piece.lse, {group}, head->mutable_lse());
  } else {
    Header(v1::Tensor::I64, {rows}, head->mutable_ids())
        ->assign(reinterpret_cast<const char*>(piece.ids.data()), piece.ids.size() * 8);
  }
  if (format.want == Want::kIds || format.want == Want::kValues) {
    Floats(piece.scores, {group, rows}, head->mutable_scores());
  }
  if (format.want == Want::kRows) RowsToWire(piece.k, d, head->mutable_k());
  if (format.want == Want::kRows || format.want == Want::kValues) {
    RowsToWire(piece.v, d, head->mutable_v());
  }
  if (!piece.zone_lse.empty()) Floats(piece.zone_lse, {group}, head->mutable_zone_lse());
  if (!piece.rest.empty()) Floats(piece.rest, {group, 1 + d}, head->mutable_rest());
}

}  // namespace

int64_t MostRequestBytes(const OpenContext& context, const EngineConfig& config) {
  constexpr int64_t kRest = int64_t{64} << 10;  // tags, shapes, numbers, fields of later versions
  constexpr int64_t kLongestId = 10;
  const AttentionShape& shape = context.shape();
  const int64_t queries = config.max_query_tokens * 4 * shape.q_heads * shape.head_dim;
  // A row held is one byte; one that takes two lies 128 rows or more behind the row before.
  const int64_t held = shape.kv_heads * context.tokens();
  const int64_t budgets = kLongestId * shape.kv_heads;
  return kRest + std::max(queries + held + budgets, kLongestId * config.max_fetch_rows);
}

absl::StatusOr<OpenRequest> FromWire(const v1::Open& open) {
  OpenRequest request;
  if (open.context().empty()) return absl::InvalidArgumentError("open: context is empty");
  request.context = open.context();
  for (const auto& field : open.fingerprint().fields()) {
    request.fingerprint.emplace_back(field.name(), field.value());
  }
  request.sink = open.sink();
  request.local = open.local();
  request.query_drift = open.query_drift();
  request.content_id = open.content_id();
  return request;
}

absl::StatusOr<QueryRequest> FromWire(const v1::Query& query, const OpenContext& context) {
  QueryRequest request;
  request.layer = LayerFromWire(query.layer());
  RETURN_IF_ERROR(QueriesFromWire(query.queries(), context, query.layer(), request));
  const auto refuse = [&](auto... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat("query: ", parts..., Where(context, query.layer())));
  };
  const v1::Select& select = query.select();
  switch (select.select_case()) {
    case v1::Select::kTopK:
      request.selection =
          select::TopK{select.top_k(), {query.head_top_k().begin(), query.head_top_k().end()}};
      break;
    case v1::Select::kAll:
      if (!select.all()) return refuse("select: all=false selects nothing");
      request.selection = select::All();
      break;
    case v1::Select::kRange:
      request.selection = select::Range{select.range(), select.max_rows()};
      break;
    case v1::Select::kMass:
      request.selection = select::Mass{select.mass(), select.max_rows()};
      break;
    default:
      return refuse("select is not given, expected top_k, all, range or mass");
  }
  if (query.head_top_k_size() > 0 && select.select_case() != v1::Select::kTopK)
    return refuse("head_top_k shares out a top_k, and select has none");
  if (query.want() < v1::IDS || query.want() > v1::ATTEND) {
    return refuse("want=", static_cast<int>(query.want()),
                  ", expected IDS, ROWS, VALUES or ATTEND");
  }
  static_assert(v1::ATTEND - v1::IDS == static_cast<int>(Want::kAttend));  // in the same order
  request.want = static_cast<Want>(query.want() - v1::IDS);
  request.speculative = query.speculative();
  request.among_candidates_of = query.among_candidates_of();
  request.measure_mass = query.measure_mass();
  request.effort = query.effort();
  request.estimate = query.estimate();
  if (query.held_size() > 0) request.held.resize(static_cast<size_t>(context.shape().kv_heads));
  std::vector<bool> given(request.held.size(), false);
  for (const v1::HeldRows& held : query.held()) {
    if (held.kv_head() >= request.held.size())
      return refuse("held: kv_head=", held.kv_head(), " is outside [0, ", request.held.size(), ")");
    if (given[held.kv_head()]) return refuse("held: kv_head=", held.kv_head(), " is given twice");
    given[held.kv_head()] = true;
    std::vector<Position>& ids = request.held[held.kv_head()];
    ids.reserve(static_cast<size_t>(held.steps_size()));
    Position last = 0;
    for (const uint64_t step : held.steps()) {
      if (step > static_cast<uint64_t>(context.tokens() - last)) {
        return refuse("held: kv_head=", held.kv_head(), ": a row beyond the context's ",
                      context.tokens(), " tokens");
      }
      last += static_cast<Position>(step);
      ids.push_back(last);
    }
  }
  return request;
}

absl::StatusOr<FetchRequest> FromWire(const v1::FetchRows& fetch, const OpenContext& context) {
  FetchRequest request;
  request.layer = LayerFromWire(fetch.layer());
  for (uint32_t kv_head : fetch.kv_heads()) {
    request.kv_heads.push_back(KvHead(LayerFromWire(kv_head).value()));
  }
  switch (fetch.rows_case()) {
    case v1::FetchRows::kRange:
      request.range = {fetch.range().begin(), fetch.range().end()};
      break;
    case v1::FetchRows::kIds:
      request.by_ids = true;
      request.ids.assign(fetch.ids().id().begin(), fetch.ids().id().end());
      break;
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "fetch rows: rows are not given, expected range or ids", Where(context, fetch.layer())));
  }
  return request;
}

void OpenReplyToWire(const Session& session, const EngineConfig& config, v1::SessionReply* wire) {
  wire->set_last(true);
  v1::OpenReply* open = wire->mutable_open();
  open->set_tokens(session.context()->tokens());
  open->set_zone_begin(session.zone().begin);
  open->set_zone_end(session.zone().end);
  *open->mutable_manifest() = session.context()->manifest();
  const v1::Manifest& manifest = session.context()->manifest();
  if (manifest.head_statistics_size() > 0) {
    std::vector<double> sums(manifest.layers());
    for (const v1::HeadStatistics& head : manifest.head_statistics()) {
      if (head.layer() < sums.size()) sums[head.layer()] += head.entropy_nats();
    }
    for (const double sum : sums) {
      open->add_layer_entropy_nats(static_cast<float>(sum / manifest.q_heads()));
    }
  }
  if (session.query_drift() != nullptr) {
    for (const std::vector<float>& drift : *session.query_drift()) {
      v1::Tensor* tensor = open->add_query_drift();
      if (!drift.empty()) Floats(drift, {manifest.q_heads(), manifest.head_dim()}, tensor);
    }
  }
  open->mutable_manifest()->clear_head_statistics();
  open->mutable_manifest()->clear_layer_sizes();
  open->mutable_manifest()->clear_segment_digests();
  open->mutable_manifest()->clear_weights_probe();
  v1::Limits* limits = open->mutable_limits();
  limits->set_max_top_k(config.max_top_k);
  limits->set_max_query_tokens(config.max_query_tokens);
  limits->set_max_in_flight(config.max_in_flight);
  limits->set_max_fetch_rows(config.max_fetch_rows);
  limits->set_max_candidate_sets(config.max_candidate_sets);
  limits->set_max_result_bytes(config.max_result_bytes);
}

void ErrorToWire(const absl::Status& status, v1::SessionReply* wire) {
  wire->set_last(true);
  wire->mutable_error()->set_code(status.raw_code());
  wire->mutable_error()->set_message(std::string(status.message()));
}

namespace {

void PiecesToWire(const Reply& reply, const std::vector<Piece>& pieces, v1::SessionReply* wire) {
  wire->Clear();
  wire->set_last(reply.done());
  const uint32_t layer = static_cast<uint32_t>(reply.layer().value());
  if (reply.kind() == Reply::Kind::kFetch) {
    v1::FetchRowsReply* fetch = wire->mutable_fetch_rows();
    fetch->set_layer(layer);
    for (const Piece& piece : pieces) {
      v1::FetchRowsReply::RowBlock* block = fetch->add_blocks();
      block->set_kv_head(static_cast<uint32_t>(piece.kv_head.value()));
      block->set_first(piece.first_row);
      RowsToWire(piece.k, reply.format().shape.head_dim, block->mutable_k());
      RowsToWire(piece.v, reply.format().shape.head_dim, block->mutable_v());
    }
    return;
  }
  v1::QueryReply* query = wire->mutable_query();
  query->set_layer(layer);
  for (const Piece& piece : pieces) PieceToWire(piece, reply.format(), query->add_heads());
  if (!reply.done()) return;
  const QueryStatistics& statistics = reply.statistics();
  query->mutable_statistics()->set_candidates(statistics.candidates);
  query->mutable_statistics()->set_visited(statistics.visited);
  query->mutable_statistics()->set_queue_us(statistics.queue_us);
  query->mutable_statistics()->set_search_us(statistics.search_us);
  query->mutable_statistics()->set_rows(statistics.rows);
}

// gRPC names a connection that it was given as a descriptor "fd:N".
void SetLocalPeer(int fd, Caller& caller) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return;
  caller.local = true;
  caller.uid = credentials.uid;
  caller.peer = absl::StrCat("unix:uid=", credentials.uid, ",pid=", credentials.pid);
}

std::string KeyOf(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto [first, last] = metadata.equal_range("authorization");
  std::string key;
  for (auto it = first; it != last; ++it) {  // two of them are none that is valid
    absl::string_view value(it->second.data(), it->second.size());
    if (absl::StartsWithIgnoreCase(value, "bearer ")) value.remove_prefix(7);
    absl::StrAppend(&key, value);
  }
  return key;
}

}  // namespace

absl::Status NextPartToWire(Reply& reply, int64_t max_bytes, v1::SessionReply* wire) {
  return TakePieces(reply, max_bytes,
                    [&](std::vector<Piece>& pieces) { PiecesToWire(reply, pieces, wire); });
}

ContextFacts FactsOf(const v1::Manifest& manifest) {
  ContextFacts facts;
  facts.content_id = manifest.content_id();
  facts.tokens = manifest.tokens();
  for (const v1::LayerSizes& sizes : manifest.layer_sizes()) {
    facts.bytes += sizes.key_bytes() + sizes.value_bytes() + sizes.index_bytes() +
                   sizes.summary_bytes() + sizes.sampled_query_bytes() + sizes.query_drift_bytes();
  }
  return facts;
}

void SummaryToWire(const v1::Manifest& manifest, v1::ListResponse_Summary* wire) {
  wire->set_name(manifest.name());
  wire->set_tokens(manifest.tokens());
  wire->set_layers(manifest.layers());
  wire->set_kv_heads(manifest.kv_heads());
  wire->set_head_dim(manifest.head_dim());
  wire->set_index_kind(manifest.index().kind());
  wire->set_created_unix_s(manifest.created_unix_s());
  wire->set_content_id(manifest.content_id());
  wire->set_bytes(FactsOf(manifest).bytes);
}

grpc::Status ToGrpc(const absl::Status& status) {
  // The codes of both are those of google.rpc.Code.
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()),
                      std::string(status.message()));
}

Caller CallerOf(const grpc::ServerContextBase& context) {
  Caller caller;
  caller.peer = context.peer();
  caller.key = KeyOf(context);
  absl::string_view peer = caller.peer;
  int fd = -1;
  if (absl::ConsumePrefix(&peer, "fd:") && absl::SimpleAtoi(peer, &fd)) {
    SetLocalPeer(fd, caller);
  } else if (absl::StartsWith(caller.peer, "unix:")) {
    caller.local = true;
  }
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) return caller;
  for (const char* property :
       {GRPC_X509_CN_PROPERTY_NAME, GRPC_PEER_DNS_PROPERTY_NAME, GRPC_PEER_URI_PROPERTY_NAME}) {
    for (const grpc::string_ref& value : auth->FindPropertyValues(property)) {
      if (!value.empty()) caller.certificate_names.emplace_back(value.data(), value.size());
    }
  }
  return caller;
}

}  // namespace carrel::kvstore
