#include "kvstore/engine/test_context.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <numeric>
#include <random>
#include <utility>

#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/dtype.h"
#include "common/file.h"
#include "common/status.h"
#include "kvstore/format/keys.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

constexpr uint8_t kBf16 = static_cast<uint8_t>(DType::kBf16);
constexpr uint8_t kBytes = 255;

std::vector<uint16_t> RandomRows(std::mt19937_64& rng, int64_t values) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> rows(static_cast<size_t>(values));
  for (uint16_t& x : rows) x = FloatToBf16(normal(rng));
  return rows;
}

double Dot(const float* a, const uint16_t* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += double{a[c]} * double{Bf16ToFloat(b[c])};
  return sum;
}

double LogSumExp(const std::vector<double>& scores) {
  if (scores.empty()) return -INFINITY;
  const double top = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double score : scores) sum += std::exp(score - top);
  return top + std::log(sum);
}

template <typename Request>
absl::StatusOr<std::unique_ptr<Reply>> SubmitAndWait(Session& session, uint64_t id,
                                                     Request request) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<std::unique_ptr<Reply>>>>();
  auto future = promise->get_future();
  RETURN_IF_ERROR(session.Submit(id, std::move(request),
                                 [promise](absl::StatusOr<std::unique_ptr<Reply>> reply) {
                                   promise->set_value(std::move(reply));
                                 }));
  return future.get();
}

absl::Status WriteTokens(const std::string& file, ContextId id, const std::vector<TokenId>& tokens,
                         v1::Manifest& manifest) {
  const std::string bytes(reinterpret_cast<const char*>(tokens.data()),
                          tokens.size() * sizeof(TokenId));
  manifest.set_token_ids_sha256(Sha256Hex(bytes));
  ASSIGN_OR_RETURN(const std::unique_ptr<SstWriter> writer, SstWriter::Create(file));
  RETURN_IF_ERROR(writer->Add({id, -1, Kind::kTokenIds, KvHead(0), 0}, bytes,
                              static_cast<uint8_t>(DType::kI32)));
  return writer->Finish();
}

}  // namespace

RandomContext::RandomContext(const RandomContextSpec& spec)
    : spec_(spec), query_drift_(static_cast<size_t>(spec.shape.layers)) {
  std::mt19937_64 rng(spec.seed);
  std::normal_distribution<float> normal;
  for (int32_t layer = 1; spec.query_drift && layer < spec.shape.layers; ++layer) {
    std::vector<float>& drift = query_drift_[static_cast<size_t>(layer)];
    drift.resize(static_cast<size_t>(spec.shape.q_heads) * spec.shape.head_dim);
    for (float& x : drift) x = normal(rng);
  }
  for (int64_t i = 0; spec.document && i < spec.tokens; ++i) {
    token_ids_.push_back(static_cast<TokenId>(rng() % 100000));
  }
  const int64_t values = spec.tokens * spec.shape.head_dim;
  for (int32_t i = 0; i < spec.shape.layers * spec.shape.kv_heads; ++i) {
    keys_.push_back(RandomRows(rng, values));
    values_.push_back(RandomRows(rng, values));
    const Rows rows = Rows::FromMemory(keys_.back().data(), spec.tokens, spec.shape.head_dim);
    absl::StatusOr<std::string> blob = BuildIndex(spec.index, rows);
    CARREL_CHECK(blob.ok());
    blobs_.push_back(*std::move(blob));
    if (spec.summary_rows == 0) continue;
    absl::StatusOr<std::string> summaries = BuildSummaries(
        spec.summary_rows, rows,
        Rows::FromMemory(values_.back().data(), spec.tokens, spec.shape.head_dim), nullptr);
    CARREL_CHECK(summaries.ok());
    summaries_.push_back(*std::move(summaries));
  }
}

const uint16_t* RandomContext::At(const Heads& heads, Layer layer, KvHead head) const {
  return heads[IndexOf(layer, head)].data();
}

const std::string& RandomContext::index_blob(Layer layer, KvHead head) const {
  return blobs_[IndexOf(layer, head)];
}

const std::string& RandomContext::summaries(Layer layer, KvHead head) const {
  return summaries_[IndexOf(layer, head)];
}

absl::Status RandomContext::Publish(Store& store, const std::string& folder, ContextId id) const {
  const AttentionShape& shape = spec_.shape;
  std::vector<std::string> files;
  v1::Manifest m;
  if (spec_.document) {
    files.push_back(absl::StrCat(folder, "/", spec_.name, "-document.sst"));
    RETURN_IF_ERROR(WriteTokens(files.back(), id, token_ids_, m));
  }
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    files.push_back(absl::StrCat(folder, "/", spec_.name, "-", layer, ".sst"));
    ASSIGN_OR_RETURN(const std::unique_ptr<SstWriter> writer, SstWriter::Create(files.back()));
    for (Kind kind : {Kind::kKeyRows, Kind::kValueRows}) {
      for (int32_t h = 0; h < shape.kv_heads; ++h) {
        const uint16_t* rows =
            At(kind == Kind::kKeyRows ? keys_ : values_, Layer(layer), KvHead(h));
        for (int64_t at = 0; at < spec_.tokens; at += spec_.segment_tokens) {
          const int64_t count = std::min(spec_.segment_tokens, spec_.tokens - at);
          RETURN_IF_ERROR(writer->Add(
              {id, layer, kind, KvHead(h), static_cast<uint32_t>(at / spec_.segment_tokens)},
              std::string(reinterpret_cast<const char*>(rows + at * shape.head_dim),
                          static_cast<size_t>(count * shape.head_dim * 2)),
              kBf16));
        }
      }
    }
    for (int32_t h = 0; h < shape.kv_heads; ++h) {
      const std::string& blob = index_blob(Layer(layer), KvHead(h));
      if (blob.empty()) continue;
      RETURN_IF_ERROR(writer->Add({id, layer, Kind::kIndex, KvHead(h), 0}, blob, kBytes));
    }
    for (int32_t h = 0; spec_.summary_rows > 0 && h < shape.kv_heads; ++h) {
      RETURN_IF_ERROR(writer->Add({id, layer, Kind::kSummaries, KvHead(h), 0},
                                  summaries(Layer(layer), KvHead(h)), kBytes));
    }
    const std::vector<float>& drift = query_drift_[static_cast<size_t>(layer)];
    if (!drift.empty()) {
      RETURN_IF_ERROR(writer->Add(
          {id, layer, Kind::kQueryDrift, KvHead(0), 0},
          absl::string_view(reinterpret_cast<const char*>(drift.data()), drift.size() * 4),
          static_cast<uint8_t>(DType::kF32)));
    }
    RETURN_IF_ERROR(writer->Finish());
  }
  m.set_format_version(kManifestFormatVersion);
  m.set_name(spec_.name);
  m.set_context_id(id.Bytes());
  m.set_tokens(spec_.tokens);
  m.set_layers(shape.layers);
  m.set_q_heads(shape.q_heads);
  m.set_kv_heads(shape.kv_heads);
  m.set_head_dim(shape.head_dim);
  m.set_kv_dtype("bf16");
  m.set_key_position("after_rope");
  m.set_segment_tokens(spec_.segment_tokens);
  m.set_summary_rows(static_cast<uint32_t>(spec_.summary_rows));
  SetIndexSpec(spec_.index, *m.mutable_index());
  for (int32_t layer = 1; spec_.query_drift && layer < shape.layers; ++layer) {
    v1::LayerSizes& sizes = *m.add_layer_sizes();
    sizes.set_layer(static_cast<uint32_t>(layer));
    sizes.set_query_drift_bytes(int64_t{4} * shape.q_heads * shape.head_dim);
  }
  for (const auto& [name, value] : spec_.fingerprint) {
    v1::Fingerprint::Field* field = m.mutable_fingerprint()->add_fields();
    field->set_name(name);
    field->set_value(value);
  }
  return store.Publish(m, files);
}

std::vector<float> RandomContext::Queries(int64_t tokens, uint64_t seed, float sharp) const {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal(0, sharp);
  std::vector<float> queries(
      static_cast<size_t>(tokens * spec_.shape.q_heads * spec_.shape.head_dim));
  for (float& x : queries) x = normal(rng);
  return queries;
}

OpenRequest RandomContext::Opening(int64_t sink, int64_t local) const {
  return {{.context = spec_.name, .fingerprint = spec_.fingerprint, .sink = sink, .local = local}};
}

std::vector<double> RandomContext::Scores(Layer layer, int64_t q_head, const float* query,
                                          RowRange zone) const {
  const int64_t d = spec_.shape.head_dim;
  const KvHead head(static_cast<int32_t>(q_head / spec_.shape.group()));
  std::vector<double> scores;
  for (Position j = zone.begin; j < zone.end; ++j) {
    scores.push_back(Dot(query, keys(layer, head) + j * d, d) / std::sqrt(double(d)));
  }
  return scores;
}

std::vector<double> RandomContext::GroupScores(Layer layer, KvHead head, const float* queries,
                                               RowRange zone) const {
  const int64_t group = spec_.shape.group();
  std::vector<double> best(static_cast<size_t>(zone.rows()), -INFINITY);
  for (int64_t h = 0; h < group; ++h) {
    const std::vector<double> scores =
        Scores(layer, head.value() * group + h, queries + h * spec_.shape.head_dim, zone);
    const double lse = LogSumExp(scores);
    for (size_t j = 0; j < best.size(); ++j) best[j] = std::max(best[j], scores[j] - lse);
  }
  return best;
}

std::vector<Position> RandomContext::Ranked(Layer layer, KvHead head, const float* queries,
                                            RowRange zone) const {
  const std::vector<double> best = GroupScores(layer, head, queries, zone);
  std::vector<Position> order(best.size());
  std::iota(order.begin(), order.end(), zone.begin);
  std::stable_sort(order.begin(), order.end(), [&](Position a, Position b) {
    return best[a - zone.begin] > best[b - zone.begin];
  });
  return order;
}

void RandomContext::Attend(Layer layer, int64_t q_head, const float* query,
                           const std::vector<Position>& rows, std::vector<float>& out,
                           float& lse) const {
  const int64_t d = spec_.shape.head_dim;
  const KvHead head(static_cast<int32_t>(q_head / spec_.shape.group()));
  std::vector<double> scores, sum(static_cast<size_t>(d));
  for (Position j : rows) scores.push_back(Scores(layer, q_head, query, {j, j + 1})[0]);
  const double total = LogSumExp(scores);
  for (size_t i = 0; i < rows.size(); ++i) {
    const double weight = std::exp(scores[i] - total);
    for (int64_t c = 0; c < d; ++c) {
      sum[c] += weight * double{Bf16ToFloat(values(layer, head)[rows[i] * d + c])};
    }
  }
  out.assign(sum.begin(), sum.end());
  lse = static_cast<float>(total);
}

std::unique_ptr<Store> MakeStore(const std::string& folder,
                                 const std::vector<const RandomContext*>& contexts) {
  absl::StatusOr<std::unique_ptr<Store>> store =
      Store::Open(folder + "/store", StoreMode::kReadWrite);
  if (!store.ok()) std::fprintf(stderr, "%s\n", store.status().ToString().c_str());
  CARREL_CHECK(store.ok());
  for (const RandomContext* context : contexts) {
    const absl::Status status = context->Publish(**store, folder);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
    CARREL_CHECK(status.ok());
  }
  return *std::move(store);
}

bool FlipBitOf(const std::string& folder, const std::string& bytes) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const absl::StatusOr<std::string> content = ReadFile(entry.path().string());
    CARREL_CHECK(content.ok());
    const size_t at = content->find(bytes);
    if (at == std::string::npos) continue;
    // In place: the file stays the one that is mapped.
    std::filesystem::permissions(entry.path(), std::filesystem::perms::owner_write,
                                 std::filesystem::perm_options::add);  // published: read-only
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const size_t target = at + bytes.size() / 2;
    file.seekp(static_cast<std::streamoff>(target));
    file.put(static_cast<char>((*content)[target] ^ 0x10));
    return file.good();
  }
  return false;
}

namespace {

absl::Status AddPieces(const Reply& reply, const std::vector<Piece>& pieces, int64_t kv_heads,
                       std::vector<CollectedHead>& heads) {
  const int64_t group = reply.format().shape.group();
  const size_t row_bytes = static_cast<size_t>(reply.format().shape.head_dim) * 2;
  if (pieces.empty()) return absl::InternalError("a part without pieces");
  for (const Piece& piece : pieces) {
    CollectedHead& head =
        heads[static_cast<size_t>(piece.token * kv_heads) + piece.kv_head.value()];
    ++head.pieces;
    head.ids.insert(head.ids.end(), piece.ids.begin(), piece.ids.end());
    head.scores.resize(piece.scores.empty() ? head.scores.size() : group);
    for (size_t h = 0; h < head.scores.size(); ++h) {
      head.scores[h].insert(head.scores[h].end(), piece.scores.begin() + h * piece.rows,
                            piece.scores.begin() + (h + 1) * piece.rows);
    }
    for (const void* row : piece.k) head.k.append(static_cast<const char*>(row), row_bytes);
    for (const void* row : piece.v) head.v.append(static_cast<const char*>(row), row_bytes);
    head.out.insert(head.out.end(), piece.out.begin(), piece.out.end());
    head.lse.insert(head.lse.end(), piece.lse.begin(), piece.lse.end());
    head.zone_lse.insert(head.zone_lse.end(), piece.zone_lse.begin(), piece.zone_lse.end());
    head.rest.insert(head.rest.end(), piece.rest.begin(), piece.rest.end());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Collected> Collect(Reply& reply, int64_t tokens, int64_t kv_heads,
                                  int64_t part_bytes) {
  Collected all;
  all.heads.resize(static_cast<size_t>(tokens * kv_heads));
  std::vector<Piece> pieces;
  while (!reply.done()) {
    std::vector<CollectedHead> before = all.heads;
    absl::Status status = reply.Next(part_bytes, pieces);
    if (status.ok()) status = AddPieces(reply, pieces, kv_heads, all.heads);
    ASSIGN_OR_RETURN(const bool confirmed, reply.Confirm());
    if (!confirmed) {
      all.heads = std::move(before);
    } else if (!status.ok()) {
      return status;
    }
  }
  all.statistics = reply.statistics();
  return all;
}

absl::StatusOr<std::unique_ptr<Reply>> Ask(Session& session, uint64_t request_id,
                                           QueryRequest request) {
  return SubmitAndWait(session, request_id, std::move(request));
}
absl::StatusOr<std::unique_ptr<Reply>> Ask(Session& session, uint64_t request_id,
                                           FetchRequest request) {
  return SubmitAndWait(session, request_id, std::move(request));
}

absl::StatusOr<Collected> AskAndCollect(Session& session, uint64_t request_id,
                                        const QueryRequest& request) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Reply> reply, Ask(session, request_id, request));
  return Collect(*reply, request.tokens, session.context()->shape().kv_heads);
}

struct Blockade::State {
  absl::Mutex mu;
  int started ABSL_GUARDED_BY(mu) = 0;
  bool released ABSL_GUARDED_BY(mu) = false;
};

Blockade::Blockade(Engine& engine, int threads) : state_(std::make_shared<State>()) {
  for (int i = 0; i < threads; ++i) {
    const absl::Status status = engine.Submit([state = state_] {
      absl::MutexLock lock(&state->mu);
      ++state->started;
      state->mu.Await(absl::Condition(&state->released));
    });
    CARREL_CHECK(status.ok());
  }
  const auto all_started = [this, threads]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return state_->started == threads;
  };
  absl::MutexLock lock(&state_->mu);
  state_->mu.Await(absl::Condition(&all_started));
}

Blockade::~Blockade() {
  absl::MutexLock lock(&state_->mu);
  state_->released = true;
}

}  // namespace carrel::kvstore
