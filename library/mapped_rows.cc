#include "library/mapped_rows.h"

#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/score/code_score/code_score.h"
#include "kvstore/format/keys.h"
#include "kvstore/index/code/code_blob.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/index/summaries/summary_table.h"
#include "kvstore/storage/store.h"

namespace carrel::library {
namespace {

using decoder::HeadCodes;
using decoder::HeadView;

// The directions by which the index itself hashes a query, and those of which it makes keys again, with
// the signs of the keys (kvstore/index/code/code.h).
HeadCodes CodesOf(const kvstore::CodeHeader& header, const kvstore::CodeDecoder& decoder,
                  const std::string& blob) {
  HeadCodes codes;
  codes.bits = header.bits;
  codes.directions.resize(decoder.query_directions().size());
  WidenToFloat(DType::kBf16, decoder.query_directions().data(), header.bits * header.head_dim,
               codes.directions.data());
  codes.decoder.resize(decoder.decoder.size());
  WidenToFloat(DType::kBf16, decoder.decoder.data(), header.bits * header.head_dim,
               codes.decoder.data());
  codes.words.assign(static_cast<size_t>(header.rows * header.bits / 32), 0);
  const char* blocks = blob.data() + kvstore::CodeBlocksOffset(header);
  const int64_t block_bytes = kernels::CodeBlockBytes(header.bits);
  for (int64_t row = 0; row < header.rows; ++row) {
    const char* block = blocks + row / kernels::kCodeBlockKeys * block_bytes;
    uint32_t* words = &codes.words[static_cast<size_t>(row * header.bits / 32)];
    for (int64_t bit = 0; bit < header.bits; ++bit) {
      const bool set = kernels::CodeBit(block, row % kernels::kCodeBlockKeys, bit);
      words[bit / 32] |= static_cast<uint32_t>(set) << bit % 32;
    }
  }
  return codes;
}

bool HasCodeIndex(const kvstore::StoredContext& context) {
  return context.manifest().index().kind() == "code";
}

class MappedRows final : public decoder::HostRows {
 public:
  explicit MappedRows(std::shared_ptr<const kvstore::StoredContext> context)
      : context_(std::move(context)),
        layers_(context_->manifest().layers()),
        kv_heads_(context_->manifest().kv_heads()),
        heads_(static_cast<size_t>(layers_) * static_cast<size_t>(kv_heads_)),
        summaries_(heads_.size()),
        mapped_(2 * heads_.size()) {}

  absl::Status Map(ThreadPool* pool) {
    ASSIGN_OR_RETURN(changes_, context_->LookAtAll());
    absl::Mutex mu;
    absl::Status failed;
    pool->ParallelFor(static_cast<int64_t>(heads_.size()), [&](int64_t i) {
      const absl::Status status = MapHead(i);
      absl::MutexLock lock(&mu);
      failed.Update(status);
    });
    return failed;
  }

  absl::Status CheckUnchanged() const override {
    ASSIGN_OR_RETURN(const int64_t changes, context_->LookAtAll());
    if (changes == changes_) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("context ", context_->manifest().name(),
                                            ": its files changed while their rows were mapped"));
  }

  int64_t tokens() const override { return static_cast<int64_t>(context_->manifest().tokens()); }
  const HeadView& At(Layer layer, KvHead head) const override { return heads_[Index(layer, head)]; }
  bool has_summaries() const override { return context_->manifest().summary_rows() > 0; }
  absl::Status EstimateRest(Layer layer, KvHead head,
                            const retrieval::EstimateRequest& request) const override {
    const size_t i = Index(layer, head);
    thread_local kvstore::EstimateScratch scratch;
    return kvstore::EstimateRest(summaries_[i], mapped_[2 * i + 1], request, scratch);
  }
  kernels::SummarySegments SummarySegmentsOf(RowRange zone) const override {
    return kvstore::SummarySegmentsOf(summaries_.front().layout(), zone);
  }
  absl::StatusOr<kernels::SummaryTable> SummaryTableOf(Layer layer, KvHead head,
                                                       RowRange zone) const override {
    const size_t i = Index(layer, head);
    return kvstore::MakeSummaryTable(summaries_[i], mapped_[2 * i + 1], zone);
  }
  absl::StatusOr<std::vector<float>> SampledQueries(Layer layer, KvHead head) const override {
    ASSIGN_OR_RETURN(kvstore::SampledQueries queries,
                     kvstore::ReadSampledQueries(*context_, layer, head));
    if (queries.samples() == 0) {
      return absl::NotFoundError(
          absl::StrCat("context ", context_->manifest().name(), ": no sampled queries are stored"));
    }
    return std::move(queries.queries);
  }
  absl::StatusOr<HeadCodes> StoredCodes(Layer layer, KvHead head) const override {
    ASSIGN_OR_RETURN(const kvstore::Blob blob,
                     kvstore::Blob::Open(*context_, layer, kvstore::Kind::kIndex, head));
    if (!HasCodeIndex(*context_) || blob.empty()) {
      return absl::NotFoundError(absl::StrCat("context ", context_->manifest().name(),
                                              " has index ", context_->manifest().index().kind(),
                                              ", not code: no codes are stored"));
    }
    kvstore::CodeDecoder decoder;
    ASSIGN_OR_RETURN(const kvstore::CodeHeader header, kvstore::DecodeCodeBlob(blob, decoder));
    ASSIGN_OR_RETURN(const std::string bytes, blob.Read());
    if (header.rows != tokens()) {
      return absl::DataLossError(
          absl::StrCat("codes of ", header.rows, " rows, the context has ", tokens()));
    }
    return CodesOf(header, decoder, bytes);
  }

 private:
  size_t Index(Layer layer, KvHead head) const {
    return static_cast<size_t>(layer.value() * kv_heads_ + head.value());
  }

  absl::Status MapHead(int64_t i) {
    const Layer layer(static_cast<int32_t>(i / kv_heads_));
    const KvHead head(static_cast<int32_t>(i % kv_heads_));
    ASSIGN_OR_RETURN(kvstore::Rows k, kvstore::Rows::OpenKeys(*context_, layer, head));
    ASSIGN_OR_RETURN(kvstore::Rows v, kvstore::Rows::OpenValues(*context_, layer, head));
    RETURN_IF_ERROR(k.Verify({0, k.count()}));
    RETURN_IF_ERROR(v.Verify({0, v.count()}));
    HeadView& rows = heads_[static_cast<size_t>(i)];
    rows.segment_rows = static_cast<int64_t>(context_->manifest().segment_tokens());
    rows.row_bytes = k.row_bytes();
    for (Position at = 0; at < k.count(); at += rows.segment_rows) {
      rows.k_segments.push_back(static_cast<const char*>(k.Address(at)));
      rows.v_segments.push_back(static_cast<const char*>(v.Address(at)));
    }
    if (has_summaries()) {
      ASSIGN_OR_RETURN(kvstore::Blob blob,
                       kvstore::Blob::Open(*context_, layer, kvstore::Kind::kSummaries, head));
      ASSIGN_OR_RETURN(summaries_[static_cast<size_t>(i)],
                       kvstore::Summaries::Open(std::move(blob), k.count(), k.head_dim()));
    }
    mapped_[static_cast<size_t>(2 * i)] = std::move(k);
    mapped_[static_cast<size_t>(2 * i + 1)] = std::move(v);
    return absl::OkStatus();
  }

  const std::shared_ptr<const kvstore::StoredContext> context_;
  const int64_t layers_, kv_heads_;
  int64_t changes_ = 0;                        // of the context's files, before they were read
  std::vector<HeadView> heads_;                // [layers, kv_heads]
  std::vector<kvstore::Summaries> summaries_;  // [layers, kv_heads], where there are any
  std::vector<kvstore::Rows> mapped_;          // K and V of each: they pin what heads_ points into
};

}  // namespace

absl::StatusOr<std::shared_ptr<const decoder::HostRows>> MapContextRows(
    const std::string& store_folder, const std::string& context, ThreadPool* pool) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(store_folder, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(auto stored, store->OpenContext(context));
  auto rows = std::make_shared<MappedRows>(std::move(stored));
  RETURN_IF_ERROR(Annotate(rows->Map(pool), "zone=host: mapping rows"));
  return std::shared_ptr<const decoder::HostRows>(std::move(rows));
}

absl::StatusOr<bool> HasStoredCodes(const std::string& store_folder, const std::string& context) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(store_folder, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const auto stored, store->OpenContext(context));
  return HasCodeIndex(*stored);
}

}  // namespace carrel::library
