#include "audit/audit_test_util.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kvstore/format/keys.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/storage/store.h"

namespace carrel::audit {
namespace {

using kvstore::ContextId;
using kvstore::Kind;

constexpr uint8_t kBf16 = static_cast<uint8_t>(DType::kBf16);
constexpr uint8_t kBytes = 255;

double Dot(const float* q, const uint16_t* row, int64_t d) {
  double sum = 0;
  for (int64_t c = 0; c < d; ++c) sum += double{q[c]} * double{Bf16ToFloat(row[c])};
  return sum;
}

std::vector<double> Scores(const RandomHead& head, int64_t sample, int64_t h,
                           const std::vector<Position>& rows) {
  std::vector<double> scores;
  for (const Position row : rows) {
    scores.push_back(
        Dot(head.queries.Query(sample, h), &head.keys[row * head.head_dim], head.head_dim) /
        std::sqrt(static_cast<double>(head.head_dim)));
  }
  return scores;
}

std::vector<double> Softmax(std::vector<double> scores) {
  const double top = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double& x : scores) sum += x = std::exp(x - top);
  for (double& x : scores) x /= sum;
  return scores;
}

absl::Status AddHead(kvstore::SstWriter& writer, const RandomContextSpec& spec, ContextId id,
                     int32_t layer, const std::vector<RandomHead>& heads, Kind kind) {
  for (int32_t h = 0; h < spec.shape.kv_heads; ++h) {
    const size_t at = static_cast<size_t>(layer) * spec.shape.kv_heads + h;
    const RandomHead& head = heads[at];
    if (kind == Kind::kSampledQueries) {
      if (spec.samples == 0) continue;
      ASSIGN_OR_RETURN(std::string payload, kvstore::EncodeSampledQueries(head.queries));
      RETURN_IF_ERROR(writer.Add({id, layer, kind, KvHead(h), 0}, std::move(payload), kBytes));
    } else if (kind == Kind::kIndex) {
      const kvstore::IndexParams& params = spec.indexes[spec.indexes.size() == 1 ? 0 : at];
      ASSIGN_OR_RETURN(std::string blob,
                       kvstore::BuildIndex(params, head.KeyRows(), &head.queries));
      if (blob.empty()) continue;
      RETURN_IF_ERROR(writer.Add({id, layer, kind, KvHead(h), 0}, std::move(blob), kBytes));
    } else {
      const auto& rows = kind == Kind::kKeyRows ? head.keys : head.values;
      for (int64_t from = 0; from < spec.tokens; from += spec.segment_tokens) {
        const int64_t count = std::min(spec.segment_tokens, spec.tokens - from);
        const auto* bytes = reinterpret_cast<const char*>(&rows[from * head.head_dim]);
        RETURN_IF_ERROR(writer.Add(
            {id, layer, kind, KvHead(h), static_cast<uint32_t>(from / spec.segment_tokens)},
            std::string(bytes, static_cast<size_t>(count * head.head_dim * 2)), kBf16));
      }
    }
  }
  return absl::OkStatus();
}

v1::Manifest ManifestOf(const RandomContextSpec& spec, ContextId id) {
  v1::Manifest m;
  m.set_format_version(kvstore::kManifestFormatVersion);
  m.set_name(spec.name);
  m.set_context_id(id.Bytes());
  m.set_tokens(spec.tokens);
  m.set_layers(static_cast<uint32_t>(spec.shape.layers));
  m.set_q_heads(static_cast<uint32_t>(spec.shape.q_heads));
  m.set_kv_heads(static_cast<uint32_t>(spec.shape.kv_heads));
  m.set_head_dim(static_cast<uint32_t>(spec.shape.head_dim));
  m.set_kv_dtype("bf16");
  m.set_key_position("after_rope");
  m.set_segment_tokens(spec.segment_tokens);
  m.set_sampled_queries(spec.samples);
  if (spec.indexes.size() == 1) {
    kvstore::SetIndexSpec(spec.indexes[0], *m.mutable_index());
    return m;
  }
  m.mutable_index()->set_kind(std::string(kvstore::kAutoIndexKind));
  for (size_t i = 0; i < spec.indexes.size(); ++i) {
    v1::HeadIndex& head = *m.add_head_indexes();
    head.set_layer(static_cast<uint32_t>(i / spec.shape.kv_heads));
    head.set_kv_head(static_cast<uint32_t>(i % spec.shape.kv_heads));
    kvstore::SetIndexSpec(spec.indexes[i], *head.mutable_index());
  }
  return m;
}

}  // namespace

RandomHead MakeHead(uint64_t seed, int64_t tokens, int64_t head_dim, int64_t group,
                    int64_t samples) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  RandomHead head{.tokens = tokens, .head_dim = head_dim};
  for (std::vector<uint16_t>* rows : {&head.keys, &head.values}) {
    for (int64_t i = 0; i < tokens * head_dim; ++i) rows->push_back(FloatToBf16(normal(rng)));
  }
  head.queries.group = group;
  head.queries.head_dim = head_dim;
  for (int64_t i = 0; i < samples; ++i) {
    const Position position = i * tokens / samples;
    head.queries.positions.push_back(position);
    for (int64_t h = 0; h < group; ++h) {
      const auto like = static_cast<int64_t>(rng() % static_cast<uint64_t>(position + 1));
      for (int64_t c = 0; c < head_dim; ++c) {
        head.queries.queries.push_back(1.5f * normal(rng) +
                                       Bf16ToFloat(head.keys[like * head_dim + c]));
      }
    }
  }
  return head;
}

PlainQuery AnswerPlainly(const RandomHead& head, int64_t sample, RowRange zone) {
  PlainQuery answer{.zone = zone};
  std::vector<Position> rows(static_cast<size_t>(zone.rows()));
  std::iota(rows.begin(), rows.end(), zone.begin);
  std::vector<double> best(rows.size(), 0);  // ln of it is the group score
  for (int64_t h = 0; h < head.queries.group; ++h) {
    answer.share.push_back(Softmax(Scores(head, sample, h, rows)));
    for (size_t j = 0; j < rows.size(); ++j) {
      best[j] = std::max(best[j], answer.share.back()[j]);
    }
  }
  answer.ranked = rows;
  std::stable_sort(answer.ranked.begin(), answer.ranked.end(), [&](Position a, Position b) {
    return best[a - zone.begin] > best[b - zone.begin];
  });
  return answer;
}

std::vector<double> AttendPlainly(const RandomHead& head, int64_t sample, int64_t head_of_group,
                                  const std::vector<Position>& rows) {
  std::vector<double> out(static_cast<size_t>(head.head_dim));
  if (rows.empty()) return out;
  const std::vector<double> share = Softmax(Scores(head, sample, head_of_group, rows));
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t c = 0; c < head.head_dim; ++c) {
      out[c] += share[i] * double{Bf16ToFloat(head.values[rows[i] * head.head_dim + c])};
    }
  }
  return out;
}

absl::StatusOr<std::shared_ptr<const kvstore::StoredContext>> PublishContext(
    const RandomContextSpec& spec, const std::string& folder, std::vector<RandomHead>* heads) {
  std::vector<RandomHead> all;
  for (int32_t i = 0; i < spec.shape.layers * spec.shape.kv_heads; ++i) {
    all.push_back(MakeHead(spec.seed + static_cast<uint64_t>(i), spec.tokens, spec.shape.head_dim,
                           spec.shape.group(), spec.samples));
  }
  std::filesystem::create_directories(folder);
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(folder + "/store", kvstore::StoreMode::kReadWrite));
  const ContextId id = ContextId::Random();
  std::vector<std::string> files;
  for (int32_t layer = 0; layer < spec.shape.layers; ++layer) {
    files.push_back(absl::StrCat(folder, "/", spec.name, "-", layer, ".sst"));
    ASSIGN_OR_RETURN(const auto writer, kvstore::SstWriter::Create(files.back()));
    for (const Kind kind :
         {Kind::kKeyRows, Kind::kValueRows, Kind::kSampledQueries, Kind::kIndex}) {
      RETURN_IF_ERROR(AddHead(*writer, spec, id, layer, all, kind));
    }
    RETURN_IF_ERROR(writer->Finish());
  }
  RETURN_IF_ERROR(store->Publish(ManifestOf(spec, id), files));
  if (heads != nullptr) *heads = std::move(all);
  return store->OpenContext(spec.name);
}

}  // namespace carrel::audit
