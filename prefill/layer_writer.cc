#include "prefill/layer_writer.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/summaries/fidelity.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"
#include "prefill/head_statistics.h"

namespace carrel::prefill {
namespace {

using kvstore::Kind;

constexpr uint8_t kBytes = 255;

absl::string_view AsBytes(const uint16_t* data, int64_t count) {
  return {reinterpret_cast<const char*>(data), static_cast<size_t>(count) * sizeof(uint16_t)};
}

// So many samples of them, evenly spread; 0: all.
kvstore::SampledQueries Keep(const kvstore::SampledQueries& sampled, int64_t count) {
  if (count == 0 || count >= sampled.samples()) return sampled;
  kvstore::SampledQueries kept;
  kept.group = sampled.group;
  kept.head_dim = sampled.head_dim;
  for (const Position sample : SamplePositions(sampled.samples(), count)) {
    kept.positions.push_back(sampled.positions[static_cast<size_t>(sample)]);
    const float* const q = sampled.Query(sample, 0);
    kept.queries.insert(kept.queries.end(), q, q + sampled.group * sampled.head_dim);
  }
  return kept;
}

// Adds the values of one layer in key order and keeps count of their payload bytes.
class LayerSst {
 public:
  LayerSst(kvstore::SstWriter& sst, kvstore::ContextId context, Layer layer)
      : sst_(sst), context_(context), layer_(layer) {}

  // Of heads [first, end).
  absl::Status AddRows(Kind kind, const std::vector<RowArray>& heads, size_t first, size_t end,
                       int64_t segment_elements, int64_t* bytes) {
    for (size_t head = first; head < end; ++head) {
      const int64_t elements = static_cast<int64_t>(heads[head].size());
      uint32_t segment = 0;
      for (int64_t at = 0; at < elements; at += segment_elements, ++segment) {
        const int64_t n = std::min(segment_elements, elements - at);
        RETURN_IF_ERROR(Add(kind, head, segment, AsBytes(&heads[head][at], n),
                            static_cast<uint8_t>(DType::kBf16), bytes));
      }
    }
    return absl::OkStatus();
  }

  // kept: of each head; 0: all.
  absl::Status AddQueries(const std::vector<kvstore::SampledQueries>& heads, int64_t kept,
                          int64_t* bytes) {
    for (size_t head = 0; head < heads.size(); ++head) {
      ASSIGN_OR_RETURN(const std::string payload,
                       kvstore::EncodeSampledQueries(Keep(heads[head], kept)));
      RETURN_IF_ERROR(AddBlob(Kind::kSampledQueries, head, payload, bytes));
    }
    return absl::OkStatus();
  }

  absl::Status AddDrift(const std::vector<float>& drift, int64_t* bytes) {
    const absl::string_view payload(reinterpret_cast<const char*>(drift.data()),
                                    drift.size() * sizeof(float));
    return Add(Kind::kQueryDrift, 0, 0, payload, static_cast<uint8_t>(DType::kF32), bytes);
  }

  absl::Status AddBlob(Kind kind, size_t head, const std::string& blob, int64_t* bytes) {
    uint32_t chunk = 0;
    for (size_t at = 0; at < blob.size(); at += kvstore::kIndexChunkBytes, ++chunk) {
      RETURN_IF_ERROR(Add(kind, head, chunk,
                          absl::string_view(blob).substr(at, kvstore::kIndexChunkBytes), kBytes,
                          bytes));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Add(Kind kind, size_t head, uint32_t segment, absl::string_view payload,
                   uint8_t dtype, int64_t* bytes) {
    *bytes += static_cast<int64_t>(payload.size());
    kvstore::SegmentKey key;
    key.context = context_;
    key.layer = layer_.value();
    key.kind = kind;
    key.kv_head = KvHead(static_cast<int32_t>(head));
    key.segment = segment;
    return sst_.Add(key, payload, dtype);
  }

  kvstore::SstWriter& sst_;
  const kvstore::ContextId context_;
  const Layer layer_;
};

// None where the layer has none.
kvstore::ProbeQueries ProbeOf(const LayerRows& rows, int32_t head) {
  const ProbeRows& probe = rows.probe;
  if (probe.tokens == 0) return {};
  return {probe.tokens, probe.queries[head].data(), probe.k[head].data(), probe.v[head].data()};
}

void AddFidelity(Layer layer, KvHead head, const kvstore::HeadFidelity& fidelity,
                 v1::Manifest& fragment) {
  if (fidelity.queries == 0) return;
  v1::HeadFidelity& out = *fragment.add_head_fidelity();
  out.set_layer(layer.value());
  out.set_kv_head(head.value());
  out.set_queries(static_cast<uint32_t>(fidelity.queries));
  out.set_probe_queries(static_cast<uint32_t>(fidelity.probe_queries));
  out.set_output(static_cast<float>(fidelity.output));
  const std::vector<double>& with = fidelity.estimate ? fidelity.with : fidelity.without;
  for (size_t i = 0; i < fidelity.without.size(); ++i) {
    out.add_rows(static_cast<uint32_t>(kvstore::kFidelityBudgets[i]));
    out.add_error(static_cast<float>(with[i]));
    out.add_error_without(static_cast<float>(fidelity.without[i]));
  }
  out.set_estimate(fidelity.estimate);
  out.set_spread_share(fidelity.spread_share);
}

}  // namespace

LayerWriter::LayerWriter(const Staging* staging, kvstore::ContextId context,
                         const AttentionShape& shape, int64_t segment_tokens,
                         kvstore::IndexParams index,
                         std::optional<kvstore::AutoIndexConfig> auto_index, int64_t summary_rows,
                         ThreadPool* pool, const LayerWriterOptions& options)
    : staging_(*staging),
      context_(context),
      shape_(shape),
      segment_tokens_(segment_tokens),
      index_(index),
      auto_index_(std::move(auto_index)),
      summary_rows_(summary_rows),
      pool_(pool),
      options_(options) {
  for (const int files : {options.row_files, options.last_row_files}) {
    CARREL_CHECK(files >= 0 && files % 2 == 0 && files <= Staging::kMaxSstParts &&
                 files / 2 <= shape.kv_heads);
  }
  CARREL_CHECK(options.writers >= 1 && (options.row_files == 0) == (options.last_row_files == 0));
  try {
    for (int i = 0; i < options.writers; ++i) threads_.emplace_back([this] { Run(); });
  } catch (...) {  // the system gives no more: those that run must not end the process
    Stop();
    throw;
  }
}

LayerWriter::~LayerWriter() { Stop(); }

void LayerWriter::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status LayerWriter::Submit(LayerRows rows) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(
      +[](LayerWriter* w)
           ABSL_NO_THREAD_SAFETY_ANALYSIS { return w->waiting_ == nullptr || !w->status_.ok(); },
      this));
  if (!status_.ok()) return status_;
  if (finished_.empty() && busy_ == 0 && written_ == 0)
    written_ = rows.layer.value();  // where a resumed job stands
  waiting_ = std::make_unique<LayerRows>(std::move(rows));
  return absl::OkStatus();
}

absl::Status LayerWriter::Finish(const std::function<void(int32_t)>& tell) {
  for (int32_t told = -1;;) {
    bool done = false;
    {
      absl::MutexLock lock(&mu_);
      const auto news = [this, told, &done]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        done = (waiting_ == nullptr && busy_ == 0) || !status_.ok();
        return done || (written_ != told);
      };
      mu_.Await(absl::Condition(&news));
      if (!status_.ok()) return status_;
      told = written_;
    }
    if (tell != nullptr) tell(told);
    if (done) return absl::OkStatus();
  }
}

LayerWriterTimes LayerWriter::times() const {
  absl::MutexLock lock(&mu_);
  return times_;
}

void LayerWriter::AddTime(double LayerWriterTimes::*what, absl::Time since) {
  const double seconds = absl::ToDoubleSeconds(absl::Now() - since);
  absl::MutexLock lock(&mu_);
  times_.*what += seconds;
}

int32_t LayerWriter::written() const {
  absl::MutexLock lock(&mu_);
  return written_;
}

void LayerWriter::Run() {
  for (;;) {
    std::unique_ptr<LayerRows> rows;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(
          +[](LayerWriter* w)
               ABSL_NO_THREAD_SAFETY_ANALYSIS { return w->waiting_ != nullptr || w->stopping_; },
          this));
      if (waiting_ == nullptr) return;
      rows = std::move(waiting_);
      ++busy_;
    }
    const absl::Status status = CatchThrown("a layer", [&] { return Write(*rows); });
    absl::MutexLock lock(&mu_);
    --busy_;
    if (!status.ok()) {
      status_.Update(status);  // the first one counts
      waiting_ = nullptr;
      return;
    }
    // Layers may be done out of turn; what counts is how far they go without a gap.
    finished_.insert(rows->layer.value());
    while (finished_.erase(written_) > 0) ++written_;
  }
}

// What is made of a layer, by KV head.
struct LayerWriter::Built {
  std::vector<kvstore::SampledQueries> queries;  // before the others
  std::vector<absl::StatusOr<kvstore::AutoIndex>> indexes;
  std::vector<absl::StatusOr<std::string>> summaries;
  std::vector<kvstore::HeadFidelity> fidelity;
};

// Summaries, and what attention with and without them leaves.
void LayerWriter::SummariseHead(const LayerRows& rows, int32_t head, Built& built) {
  const absl::Time start = absl::Now();
  const int64_t d = shape_.head_dim;
  const int64_t tokens = static_cast<int64_t>(rows.k[head].size()) / d;
  const auto keys = kvstore::Rows::FromMemory(rows.k[head].data(), tokens, d);
  const auto values = kvstore::Rows::FromMemory(rows.v[head].data(), tokens, d);
  const kvstore::SampledQueries& queries = built.queries[head];
  absl::StatusOr<std::string>& summaries = built.summaries[head];
  if (!rows.summaries.empty()) {
    summaries = rows.summaries[static_cast<size_t>(head)];
  } else if (summary_rows_ > 0) {
    summaries =
        kvstore::BuildSummaries(summary_rows_, keys, values, &queries, options_.accelerator, pool_);
  }
  AddTime(&LayerWriterTimes::indexing, start);
  if (!summaries.ok() || queries.samples() == 0 || options_.statistics_samples == 0) return;
  const absl::Time summarised = absl::Now();
  const absl::Status status =
      MeasureHead(keys, values, queries, ProbeOf(rows, head), *summaries, built.fidelity[head]);
  if (!status.ok()) summaries = status;
  AddTime(&LayerWriterTimes::statistics, summarised);
}

// The summaries, if any, are told what share of their spreads counts.
absl::Status LayerWriter::MeasureHead(const kvstore::Rows& keys, const kvstore::Rows& values,
                                      const kvstore::SampledQueries& queries,
                                      const kvstore::ProbeQueries& probe, std::string& summaries,
                                      kvstore::HeadFidelity& fidelity) {
  if (summaries.empty()) {
    ASSIGN_OR_RETURN(fidelity, kvstore::MeasureFidelity(keys, values, queries, probe, nullptr));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const kvstore::Summaries opened,
                   kvstore::Summaries::Open(summaries, keys.count(), keys.head_dim()));
  ASSIGN_OR_RETURN(fidelity, kvstore::MeasureFidelity(keys, values, queries, probe, &opened));
  kvstore::SetEstimateFit({fidelity.spread_share, !fidelity.estimate}, summaries);
  return absl::OkStatus();
}

void LayerWriter::IndexHead(const LayerRows& rows, int32_t head, Built& built) {
  const absl::Time start = absl::Now();
  const int64_t d = shape_.head_dim;
  const int64_t tokens = static_cast<int64_t>(rows.k[head].size()) / d;
  const kvstore::SampledQueries& queries = built.queries[head];
  const auto keys = kvstore::Rows::FromMemory(rows.k[head].data(), tokens, d);
  if (auto_index_.has_value()) {
    built.indexes[head] =
        kvstore::BuildAutoIndex(*auto_index_, keys, queries, options_.accelerator);
  } else {
    absl::StatusOr<std::string> blob =
        kvstore::BuildIndex(index_, keys, &queries, options_.accelerator);
    if (blob.ok()) {
      built.indexes[head]->blob = *std::move(blob);
    } else {
      built.indexes[head] = blob.status();
    }
  }
  AddTime(&LayerWriterTimes::indexing, start);
}

int LayerWriter::RowFiles(Layer layer) const {
  return layer.value() + 1 == shape_.layers ? options_.last_row_files : options_.row_files;
}

absl::Status LayerWriter::WritePart(const LayerRows& rows, int part, int64_t* bytes) {
  const absl::Time start = absl::Now();
  const int of_kind = RowFiles(rows.layer) / 2;
  const bool keys = part < of_kind;
  const auto edge = [&](int i) { return static_cast<size_t>(i) * rows.k.size() / of_kind; };
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::SstWriter> sst,
                   kvstore::SstWriter::Create(staging_.SstPartPath(rows.layer, part)));
  LayerSst out(*sst, context_, rows.layer);
  RETURN_IF_ERROR(out.AddRows(keys ? Kind::kKeyRows : Kind::kValueRows, keys ? rows.k : rows.v,
                              edge(part % of_kind), edge(part % of_kind + 1),
                              segment_tokens_ * shape_.head_dim, bytes));
  RETURN_IF_ERROR(sst->Finish());
  AddTime(&LayerWriterTimes::writing, start);
  return absl::OkStatus();
}

absl::Status LayerWriter::WriteRest(const LayerRows& rows, const Built& built,
                                    v1::Manifest& fragment) {
  const absl::Time start = absl::Now();
  v1::LayerSizes& sizes = *fragment.mutable_layer_sizes(0);
  int64_t key_bytes = 0, value_bytes = 0, query_bytes = 0, index_bytes = 0, summary_bytes = 0;
  int64_t drift_bytes = 0;
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::SstWriter> sst,
                   kvstore::SstWriter::Create(staging_.SstPath(rows.layer)));
  LayerSst out(*sst, context_, rows.layer);
  if (options_.row_files == 0) {
    const int64_t segment = segment_tokens_ * shape_.head_dim;
    RETURN_IF_ERROR(out.AddRows(Kind::kKeyRows, rows.k, 0, rows.k.size(), segment, &key_bytes));
    RETURN_IF_ERROR(out.AddRows(Kind::kValueRows, rows.v, 0, rows.v.size(), segment, &value_bytes));
    sizes.set_key_bytes(key_bytes);
    sizes.set_value_bytes(value_bytes);
  }
  RETURN_IF_ERROR(out.AddQueries(built.queries, options_.kept_queries, &query_bytes));
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    const absl::StatusOr<kvstore::AutoIndex>& index = built.indexes[head];
    if (!index.ok()) {
      return Annotate(index.status(),
                      absl::StrCat("index of layer ", rows.layer.value(), " kv_head ", head));
    }
    RETURN_IF_ERROR(out.AddBlob(Kind::kIndex, head, index->blob, &index_bytes));
    if (!auto_index_.has_value()) continue;
    v1::HeadIndex& chosen = *fragment.add_head_indexes();
    chosen.set_layer(rows.layer.value());
    chosen.set_kv_head(head);
    kvstore::SetIndexSpec(index->params, *chosen.mutable_index());
    chosen.set_recall(static_cast<float>(index->recall));
    chosen.set_mass(static_cast<float>(index->mass));
    chosen.set_cost_us(static_cast<float>(index->cost_us));
    chosen.set_exact_us(static_cast<float>(index->exact_us));
    chosen.set_wanted(static_cast<uint32_t>(auto_index_->wanted));
  }
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    if (!built.summaries[head].ok()) {
      return Annotate(built.summaries[head].status(),
                      absl::StrCat("summaries of layer ", rows.layer.value(), " kv_head ", head));
    }
    RETURN_IF_ERROR(out.AddBlob(Kind::kSummaries, head, *built.summaries[head], &summary_bytes));
  }
  if (!rows.query_drift.empty()) RETURN_IF_ERROR(out.AddDrift(rows.query_drift, &drift_bytes));
  RETURN_IF_ERROR(sst->Finish());
  sizes.set_query_drift_bytes(drift_bytes);
  sizes.set_sampled_query_bytes(query_bytes);
  sizes.set_index_bytes(index_bytes);
  sizes.set_summary_bytes(summary_bytes);
  AddTime(&LayerWriterTimes::writing, start);
  return absl::OkStatus();
}

absl::Status LayerWriter::Write(const LayerRows& rows) {
  staging_.DropLayer(rows.layer);  // an earlier run's: it must not vouch for files to come
  RETURN_IF_ERROR(staging_.RemoveSsts(rows.layer));
  const int32_t heads = shape_.kv_heads;
  const int parts = RowFiles(rows.layer);
  Built built;
  built.indexes.assign(heads, kvstore::AutoIndex());
  built.summaries.assign(heads, std::string());
  built.fidelity.resize(heads);
  for (int32_t head = 0; head < heads; ++head) {
    kvstore::SampledQueries queries;
    queries.group = shape_.group();
    queries.head_dim = shape_.head_dim;
    queries.positions = rows.sample_positions;
    queries.queries = rows.queries[head];
    built.queries.push_back(std::move(queries));
  }
  std::vector<absl::Status> written(parts);
  std::vector<int64_t> bytes(parts);
  const int32_t described = options_.statistics_samples > 0 ? heads : 0;
  std::vector<HeadStatistics> statistics(described * shape_.group());
  pool_->ParallelFor(2 * heads + parts + described, [&](int64_t unit) {
    if (unit < heads) return IndexHead(rows, static_cast<int32_t>(unit), built);
    unit -= heads;
    if (unit < heads) return SummariseHead(rows, static_cast<int32_t>(unit), built);
    unit -= heads;
    if (unit < parts) {
      written[unit] = WritePart(rows, static_cast<int>(unit), &bytes[unit]);
      return;
    }
    const absl::Time start = absl::Now();
    const KvHead head(static_cast<int32_t>(unit - parts));
    DescribeHead(rows, shape_, head, options_.statistics_samples,
                 &statistics[head.value() * shape_.group()]);
    AddTime(&LayerWriterTimes::statistics, start);
  });
  for (const absl::Status& status : written) RETURN_IF_ERROR(status);

  v1::Manifest fragment;
  v1::LayerSizes& sizes = *fragment.add_layer_sizes();
  sizes.set_layer(rows.layer.value());
  sizes.set_key_bytes(std::accumulate(bytes.begin(), bytes.begin() + parts / 2, int64_t{0}));
  sizes.set_value_bytes(std::accumulate(bytes.begin() + parts / 2, bytes.end(), int64_t{0}));
  RETURN_IF_ERROR(WriteRest(rows, built, fragment));
  for (const HeadStatistics& head : statistics) {
    v1::HeadStatistics& out_head = *fragment.add_head_statistics();
    out_head.set_layer(rows.layer.value());
    out_head.set_q_head(head.q_head.value());
    out_head.set_entropy_nats(static_cast<float>(head.entropy_nats));
    out_head.set_keys_for_75_mass(static_cast<float>(head.keys_for_75_mass));
    out_head.set_samples(static_cast<uint32_t>(head.samples));
  }
  kvstore::CombineFidelity(absl::MakeSpan(built.fidelity));
  for (int32_t head = 0; head < heads; ++head) {
    AddFidelity(rows.layer, KvHead(head), built.fidelity[head], fragment);
  }
  if (options_.still_right) RETURN_IF_ERROR(options_.still_right());
  if (!rows.entering.empty()) RETURN_IF_ERROR(staging_.WriteEntering(rows.layer, rows.entering));
  return staging_.WriteFragment(rows.layer, fragment);
}

}  // namespace carrel::prefill
