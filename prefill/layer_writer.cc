#include "prefill/layer_writer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/summaries.h"
#include "kvstore/storage/store.h"
#include "prefill/head_statistics.h"

namespace carrel::prefill {
namespace {

using kvstore::Kind;

constexpr uint8_t kBytes = 255;

// With room for what the segment appends (its CRCs and footer): a value of 16 MiB is not to be
// moved for that.
std::string AsBytes(const uint16_t* data, int64_t count) {
  const size_t size = static_cast<size_t>(count) * sizeof(uint16_t);
  std::string bytes;
  bytes.reserve(size + size / 256 + 1024);
  bytes.append(reinterpret_cast<const char*>(data), size);
  return bytes;
}

// Adds the values of one layer in key order and keeps count of their payload bytes.
class LayerSst {
 public:
  LayerSst(kvstore::SstWriter& sst, ContextId context, Layer layer)
      : sst_(sst), context_(context), layer_(layer) {}

  absl::Status AddRows(Kind kind, const std::vector<RowArray>& heads, int64_t segment_elements,
                       int64_t* bytes) {
    for (size_t head = 0; head < heads.size(); ++head) {
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

  absl::Status AddBlob(Kind kind, size_t head, const std::string& blob, int64_t* bytes) {
    uint32_t chunk = 0;
    for (size_t at = 0; at < blob.size(); at += kvstore::kIndexChunkBytes, ++chunk) {
      RETURN_IF_ERROR(
          Add(kind, head, chunk, blob.substr(at, kvstore::kIndexChunkBytes), kBytes, bytes));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Add(Kind kind, size_t head, uint32_t segment, std::string payload, uint8_t dtype,
                   int64_t* bytes) {
    *bytes += static_cast<int64_t>(payload.size());
    kvstore::SegmentKey key;
    key.context = context_;
    key.layer = layer_.value();
    key.kind = kind;
    key.kv_head = KvHead(static_cast<int32_t>(head));
    key.segment = segment;
    return sst_.Add(key, std::move(payload), dtype);
  }

  kvstore::SstWriter& sst_;
  const ContextId context_;
  const Layer layer_;
};

}  // namespace

LayerWriter::LayerWriter(const Staging* staging, ContextId context, const AttentionShape& shape,
                         int64_t segment_tokens, kvstore::IndexParams index,
                         std::optional<kvstore::AutoIndexConfig> auto_index, int64_t summary_rows,
                         ThreadPool* pool, int64_t statistics_samples, int writers)
    : staging_(*staging),
      context_(context),
      shape_(shape),
      segment_tokens_(segment_tokens),
      index_(index),
      auto_index_(std::move(auto_index)),
      summary_rows_(summary_rows),
      pool_(pool),
      statistics_samples_(statistics_samples) {
  CARREL_CHECK(writers >= 1);
  for (int i = 0; i < writers; ++i) threads_.emplace_back([this] { Run(); });
}

LayerWriter::~LayerWriter() {
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

absl::Status LayerWriter::Finish() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(
      +[](LayerWriter* w) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return (w->waiting_ == nullptr && w->busy_ == 0) || !w->status_.ok();
      },
      this));
  return status_;
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
    const absl::Status status = Write(*rows);
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

absl::Status LayerWriter::Write(const LayerRows& rows) const {
  const int64_t d = shape_.head_dim;
  const int64_t tokens = static_cast<int64_t>(rows.k[0].size()) / d;

  std::vector<absl::StatusOr<kvstore::AutoIndex>> built(shape_.kv_heads, kvstore::AutoIndex());
  std::vector<absl::StatusOr<std::string>> summaries(shape_.kv_heads, std::string());
  std::vector<kvstore::SampledQueries> queries(shape_.kv_heads);
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    queries[head].group = shape_.group();
    queries[head].head_dim = shape_.head_dim;
    queries[head].positions = rows.sample_positions;
    queries[head].queries = rows.queries[head];
  }
  pool_->ParallelFor(shape_.kv_heads, [&](int64_t head) {
    const auto keys = kvstore::Rows::FromMemory(rows.k[head].data(), tokens, d);
    if (summary_rows_ > 0) {
      const auto values = kvstore::Rows::FromMemory(rows.v[head].data(), tokens, d);
      summaries[head] = kvstore::BuildSummaries(summary_rows_, keys, values, &queries[head]);
    }
    if (auto_index_.has_value()) {
      built[head] = kvstore::BuildAutoIndex(*auto_index_, keys, queries[head]);
      return;
    }
    absl::StatusOr<std::string> blob = kvstore::BuildIndex(index_, keys, &queries[head]);
    if (blob.ok()) {
      built[head]->blob = *std::move(blob);
    } else {
      built[head] = blob.status();
    }
  });

  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::SstWriter> sst,
                   kvstore::SstWriter::Create(staging_.SstPath(rows.layer)));
  v1::Manifest fragment;
  v1::LayerSizes& sizes = *fragment.add_layer_sizes();
  sizes.set_layer(rows.layer.value());
  int64_t key_bytes = 0, value_bytes = 0, query_bytes = 0, index_bytes = 0, summary_bytes = 0;
  LayerSst out(*sst, context_, rows.layer);
  RETURN_IF_ERROR(out.AddRows(Kind::kKeyRows, rows.k, segment_tokens_ * d, &key_bytes));
  RETURN_IF_ERROR(out.AddRows(Kind::kValueRows, rows.v, segment_tokens_ * d, &value_bytes));
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    ASSIGN_OR_RETURN(const std::string payload, kvstore::EncodeSampledQueries(queries[head]));
    RETURN_IF_ERROR(out.AddBlob(Kind::kSampledQueries, head, payload, &query_bytes));
  }
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    if (!built[head].ok()) {
      return Annotate(built[head].status(),
                      absl::StrCat("index of layer ", rows.layer.value(), " kv_head ", head));
    }
    RETURN_IF_ERROR(out.AddBlob(Kind::kIndex, head, built[head]->blob, &index_bytes));
    if (!auto_index_.has_value()) continue;
    v1::HeadIndex& chosen = *fragment.add_head_indexes();
    chosen.set_layer(rows.layer.value());
    chosen.set_kv_head(head);
    kvstore::SetIndexSpec(built[head]->params, *chosen.mutable_index());
    chosen.set_recall(static_cast<float>(built[head]->recall));
    chosen.set_mass(static_cast<float>(built[head]->mass));
    chosen.set_cost_us(static_cast<float>(built[head]->cost_us));
    chosen.set_exact_us(static_cast<float>(built[head]->exact_us));
    chosen.set_wanted(static_cast<uint32_t>(auto_index_->wanted));
  }
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    if (!summaries[head].ok()) {
      return Annotate(summaries[head].status(),
                      absl::StrCat("summaries of layer ", rows.layer.value(), " kv_head ", head));
    }
    RETURN_IF_ERROR(out.AddBlob(Kind::kSummaries, head, *summaries[head], &summary_bytes));
  }
  RETURN_IF_ERROR(sst->Finish());

  sizes.set_key_bytes(key_bytes);
  sizes.set_value_bytes(value_bytes);
  sizes.set_sampled_query_bytes(query_bytes);
  sizes.set_index_bytes(index_bytes);
  sizes.set_summary_bytes(summary_bytes);
  for (const HeadStatistics& head :
       ComputeHeadStatistics(rows, shape_, statistics_samples_, pool_)) {
    v1::HeadStatistics& out_head = *fragment.add_head_statistics();
    out_head.set_layer(rows.layer.value());
    out_head.set_q_head(head.q_head.value());
    out_head.set_entropy_nats(static_cast<float>(head.entropy_nats));
    out_head.set_keys_for_75_mass(static_cast<float>(head.keys_for_75_mass));
    out_head.set_samples(static_cast<uint32_t>(head.samples));
  }
  return staging_.WriteFragment(rows.layer, fragment);
}

}  // namespace carrel::prefill
