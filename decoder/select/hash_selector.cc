#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "common/dtype.h"
#include "common/status.h"
#include "decoder/select/hash_codes.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "decoder/select/row_selector.h"
#include "kernels/score/block_hamming/block_hamming.h"
#include "kernels/score/code_score/code_score.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"

namespace carrel::decoder {
namespace {

HeadCodes RandomCodes(const HashConfig& config, const HeadView& rows, RowRange zone, int64_t d) {
  constexpr int64_t kRowsAtOnce = 256;  // their products stay in the cache
  HeadCodes codes;
  codes.bits = config.bits;
  codes.directions = RandomRotations(config.bits, d, config.seed);
  const int64_t words = config.bits / 32;
  codes.words.assign(static_cast<size_t>(zone.rows() * words), 0);
  std::vector<float> key(static_cast<size_t>(d)), products;
  std::vector<double> mean(static_cast<size_t>(d));
  for (Position row = zone.begin; row < zone.end; ++row) {
    WidenToFloat(DType::kBf16, rows.Key(row), d, key.data());
    for (int64_t c = 0; c < d; ++c) mean[static_cast<size_t>(c)] += key[static_cast<size_t>(c)];
  }
  std::vector<float> threshold(static_cast<size_t>(config.bits));  // what the mean itself scores
  for (size_t b = 0; b < threshold.size(); ++b) {
    double sum = 0;
    for (size_t c = 0; c < mean.size(); ++c) sum += mean[c] * codes.directions[b * mean.size() + c];
    threshold[b] = static_cast<float>(sum / static_cast<double>(std::max<int64_t>(1, zone.rows())));
  }
  for (Position at = zone.begin; at < zone.end;) {
    const int64_t count = std::min(kRowsAtOnce, rows.Contiguous(at, zone.end));
    products.resize(static_cast<size_t>(config.bits * count));
    kernels::DotScore(codes.directions.data(), config.bits, d, rows.Key(at), count, 1.0f,
                      products.data(), count);
    uint32_t* out = &codes.words[static_cast<size_t>((at - zone.begin) * words)];
    for (int64_t b = 0; b < config.bits; ++b) {
      for (int64_t j = 0; j < count; ++j) {
        const bool set =
            products[static_cast<size_t>(b * count + j)] > threshold[static_cast<size_t>(b)];
        out[j * words + b / 32] |= static_cast<uint32_t>(set) << b % 32;
      }
    }
    at += count;
  }
  const SpreadSample sample(zone.rows());
  std::vector<float> keys(static_cast<size_t>(sample.count * d));
  for (int64_t i = 0; i < sample.count; ++i) {
    WidenToFloat(DType::kBf16, rows.Key(zone.begin + i * sample.stride), d,
                 &keys[static_cast<size_t>(i * d)]);
  }
  codes.decoder = RotationDecoder(codes.directions, threshold, keys, d);
  return codes;
}

// Codes as kernels/score/code_score wants them.
std::vector<uint8_t> BlocksOf(const HeadCodes& codes, const std::vector<int64_t>& rows) {
  const int64_t block_bytes = kernels::CodeBlockBytes(codes.bits);
  const auto count = static_cast<int64_t>(rows.size());
  std::vector<uint8_t> blocks(static_cast<size_t>((count + kernels::kCodeBlockKeys - 1) /
                                                  kernels::kCodeBlockKeys * block_bytes));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t key = i % kernels::kCodeBlockKeys;
    uint8_t* block = &blocks[static_cast<size_t>(i / kernels::kCodeBlockKeys * block_bytes)];
    const uint32_t* words =
        &codes.words[static_cast<size_t>(rows[static_cast<size_t>(i)] * codes.bits / 32)];
    for (int64_t byte = 0; byte < codes.bits / 8; ++byte) {
      block[byte * kernels::kCodeBlockKeys + (key < 32 ? 2 * key : 2 * (key - 32) + 1)] =
          static_cast<uint8_t>(words[byte / 4] >> (byte % 4 * 8));
    }
  }
  return blocks;
}

// What a row's bits tell of it: the best query's score; or, of signs, how many agree with the queries' own.
class CodeScores {
 public:
  CodeScores(const AttentionShape& shape, RowRange zone, bool signs, std::vector<HeadCodes> codes)
      : shape_(shape), rows_(zone.rows()), samples_(std::min(kSamples, rows_)), signs_(signs) {
    std::vector<int64_t> all(static_cast<size_t>(rows_)), some;
    std::iota(all.begin(), all.end(), 0);
    for (int64_t i = 0; i < samples_; ++i) some.push_back(i * rows_ / samples_);
    for (HeadCodes& of : codes) {
      heads_.push_back({of.bits, std::move(signs ? of.directions : of.decoder), BlocksOf(of, all),
                        signs ? std::vector<uint8_t>() : BlocksOf(of, some)});
    }
  }

  int64_t bits() const { return heads_.empty() ? 0 : heads_[0].bits; }

  // scores [rows]
  void Score(const SelectRequest& request, std::vector<float>& scores) const {
    thread_local std::vector<float> u;
    const Head& head =
        heads_[static_cast<size_t>(request.layer.value() * shape_.kv_heads + request.head.value())];
    u.resize(static_cast<size_t>(request.queries * head.bits));
    const float scale = signs_ ? 1.0f : 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    for (int64_t h = 0; h < request.queries; ++h) {
      for (int64_t b = 0; b < head.bits; ++b) {
        float dot = 0;
        for (int64_t c = 0; c < shape_.head_dim; ++c) {
          dot += request.q[h * shape_.head_dim + c] *
                 head.matrix[static_cast<size_t>(b * shape_.head_dim + c)];
        }
        u[static_cast<size_t>(h * head.bits + b)] = scale * dot;
      }
    }
    scores.assign(static_cast<size_t>(rows_), 0.0f);
    if (!signs_) return ScoreByWeights(head, u, request.queries, scores);
    for (int64_t first = 0; first < request.queries; first += kernels::kMaxHammingGroup) {
      AddAgreeing(head, &u[static_cast<size_t>(first * head.bits)],
                  std::min(kernels::kMaxHammingGroup, request.queries - first), scores);
    }
  }

 private:
  static constexpr int64_t kSamples = 256;  // as kernels/select/code_topk
  struct Head {
    int64_t bits;
    std::vector<float> matrix;            // [bits, head_dim], that queries are multiplied with
    std::vector<uint8_t> blocks, sample;  // of the zone's rows; of some of them
  };

  int64_t blocks() const { return (rows_ + kernels::kCodeBlockKeys - 1) / kernels::kCodeBlockKeys; }

  void AddAgreeing(const Head& head, const float* u, int64_t queries,
                   std::vector<float>& scores) const {
    thread_local kernels::HammingTables tables;
    thread_local std::vector<int16_t> of_rows;
    kernels::MakeHammingTables(u, queries, head.bits, tables);
    of_rows.resize(static_cast<size_t>(blocks() * kernels::kCodeBlockKeys));
    kernels::BlockHammingScore(tables, head.blocks.data(), blocks(), of_rows.data());
    for (size_t j = 0; j < scores.size(); ++j) scores[j] += of_rows[j];
  }

  void ScoreByWeights(const Head& head, const std::vector<float>& u, int64_t queries,
                      std::vector<float>& scores) const {
    thread_local kernels::CodeTables tables;
    thread_local std::vector<int16_t> of_rows;
    kernels::MakeCodeTables(u.data(), queries, head.bits, tables);
    SetBases(head, tables);
    of_rows.resize(static_cast<size_t>(blocks() * kernels::kCodeBlockKeys));
    kernels::CodeScore(tables, head.blocks.data(), blocks(), of_rows.data());
    scores.assign(of_rows.begin(), of_rows.begin() + rows_);
  }

  // Scores count less the logarithm of what sampled rows say that the sum of exponentials is.
  void SetBases(const Head& head, kernels::CodeTables& tables) const {
    thread_local std::vector<int16_t> totals;
    thread_local std::vector<float> offsets, scores;
    const int64_t blocks = (samples_ + kernels::kCodeBlockKeys - 1) / kernels::kCodeBlockKeys;
    const int64_t stride = blocks * kernels::kCodeBlockKeys;
    totals.resize(static_cast<size_t>(tables.group * stride));
    kernels::CodeTotals(tables, head.sample.data(), blocks, totals.data(), stride);
    offsets.clear();
    for (int64_t h = 0; h < tables.group; ++h) {
      scores.clear();
      for (int64_t i = 0; i < samples_; ++i) {
        scores.push_back(tables.minimum[static_cast<size_t>(h)] +
                         tables.step[static_cast<size_t>(h)] *
                             static_cast<float>(totals[static_cast<size_t>(h * stride + i)]));
      }
      offsets.push_back(-kernels::LogSumExp(scores.data(), samples_));
    }
    kernels::SetCodeOffsets(offsets.data(), tables);
  }

  const AttentionShape shape_;
  const int64_t rows_, samples_;
  const bool signs_;
  std::vector<Head> heads_;  // [layers, kv_heads]
};

class HashSelector final : public RowSelector {
 public:
  HashSelector(const SelectorConfig& config, const SelectorInput& input,
               std::vector<HeadCodes> codes)
      : head_dim_(input.shape.head_dim),
        zone_(input.zone),
        oversample_(config.oversample),
        rows_(input.rows),
        scores_(input.shape, input.zone, config.hash.query == HashQuery::kSigns, std::move(codes)) {
  }

  void Select(const SelectRequest& request, SelectedRows& selection) override {
    const int64_t candidates = CandidateCount(request.budget, oversample_, zone_);
    if (candidates == zone_.rows()) {
      AllRows(zone_, selection.rows);
    } else {
      thread_local std::vector<float> scores;
      scores_.Score(request, scores);
      selection.visited += zone_.rows();
      selection.bytes_read += zone_.rows() * scores_.bits() / 8;
      selection.rows = BestIndices(scores, candidates);
      for (Position& row : selection.rows) row += zone_.begin;
    }
    KeepBestByKeys(request, rows_.At(request.layer, request.head), head_dim_, selection);
  }

 private:
  const int64_t head_dim_;
  const RowRange zone_;
  const int64_t oversample_;
  const HostRows& rows_;
  const CodeScores scores_;
};

absl::StatusOr<std::unique_ptr<RowSelector>> MakeSelector(const SelectorConfig& given,
                                                          const SelectorInput& input) {
  const HashConfig& config = given.hash;
  ASSIGN_OR_RETURN(const HashSource source, SourceOfCodes(config, &input.rows));
  std::vector<HeadCodes> codes(static_cast<size_t>(input.shape.layers) * input.shape.kv_heads);
  absl::Mutex mu;
  absl::Status failed;
  input.pool->ParallelFor(static_cast<int64_t>(codes.size()), [&](int64_t i) {
    const Layer layer(static_cast<int32_t>(i / input.shape.kv_heads));
    const KvHead head(static_cast<int32_t>(i % input.shape.kv_heads));
    HeadCodes& to = codes[static_cast<size_t>(i)];
    if (source == HashSource::kRandom) {
      to = RandomCodes(config, input.rows.At(layer, head), input.zone, input.shape.head_dim);
      return;
    }
    absl::StatusOr<HeadCodes> stored = StoredCodesOf(input.rows, layer, head, input.shape.head_dim);
    if (stored.ok()) {  // the zone's part
      const int64_t words = stored->bits / 32;
      stored->words.resize(static_cast<size_t>(input.zone.end * words));
      stored->words.erase(stored->words.begin(), stored->words.begin() + input.zone.begin * words);
      to = *std::move(stored);
      return;
    }
    absl::MutexLock lock(&mu);
    failed.Update(stored.status());
  });
  RETURN_IF_ERROR(failed);
  return std::make_unique<HashSelector>(given, input, std::move(codes));
}

class HashMethodType final : public MethodType {
 public:
  absl::string_view name() const override { return "hash"; }
  absl::Status Parse(const MethodSettings& settings, SelectorConfig& config) const override {
    HashConfig& hash = config.hash;
    RETURN_IF_ERROR(settings.Set(
        {{"codes",
          MethodSettings::OneOf<HashSource>(hash.source, {{"auto", HashSource::kAuto},
                                                          {"random", HashSource::kRandom},
                                                          {"stored", HashSource::kStored}})},
         {"query", MethodSettings::OneOf<HashQuery>(hash.query, {{"weights", HashQuery::kWeights},
                                                                 {"signs", HashQuery::kSigns}})},
         {"bits", MethodSettings::Number(hash.bits, 32, 256)},
         {"seed", MethodSettings::Number(hash.seed, 0, std::numeric_limits<int64_t>::max())},
         {"oversample", MethodSettings::Oversample(config.oversample)}}));
    if (hash.bits % 32 != 0)
      return settings.Refuse(absl::StrCat("bits=", hash.bits, " is not a multiple of 32"));
    // Random codes alone have bits and a seed.
    if (!settings.Has("bits") && !settings.Has("seed")) return absl::OkStatus();
    if (hash.source == HashSource::kStored) {
      return settings.Refuse("stored codes have their own bits; bits and seed go with random");
    }
    hash.source = HashSource::kRandom;
    return absl::OkStatus();
  }
  std::string Describe(const SelectorConfig& config) const override {
    constexpr absl::string_view kSources[] = {"auto", "random", "stored"};
    const HashConfig& hash = config.hash;
    return absl::StrCat(
        ":codes=", kSources[static_cast<size_t>(hash.source)],
        hash.source == HashSource::kRandom ? absl::StrCat(",bits=", hash.bits) : "",
        hash.query == HashQuery::kSigns ? ",query=signs" : "", ",oversample=",
        config.oversample == kAutoOversample ? "auto" : absl::StrCat(config.oversample));
  }
  bool needs_host_rows(const SelectorConfig& config) const override {
    return config.hash.source == HashSource::kStored;
  }
  bool reads_keys(const SelectorConfig& config) const override { return config.oversample != 1; }
  bool after_rope() const override { return true; }
  bool forks() const override { return true; }
  absl::Status ValidateCuda(const SelectorConfig& config) const override {
    const HashConfig& hash = config.hash;
    if (hash.source != HashSource::kRandom || hash.bits == 64 || hash.bits == 128 ||
        hash.bits == 256) {
      return absl::OkStatus();
    }
    return NotOnGpu("bits", hash.bits, "64, 128 and 256");
  }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig& config,
                                                    const SelectorInput& input) const override {
    return MakeSelector(config, input);
  }
};

}  // namespace

const MethodType& HashMethod() {
  static const HashMethodType method;
  return method;
}

}  // namespace carrel::decoder
