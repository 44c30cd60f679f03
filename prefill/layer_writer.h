// What:    turns a finished layer into its SST files, beside the forward pass: index, summaries,
//          head statistics, segments, sync, then the layer's fragment of the manifest.
// Errors:  the first failure stops the writer; Submit and Finish return it.
// Ownership: staging, pool and accelerator outlive it.
// Threads: one producer; `writers` threads of its own, which share the pool for index building. One
//          suffices a CPU; a GPU computes layers faster than one thread writes them.
//
// Invariants
//   1. A layer's fragment file exists only if its SSTs, and what entered it, are complete and
//      synced: a resumed job trusts exactly the layers that have one.
//   2. At most one layer waits while `writers` others are written: Submit blocks, so memory is
//      bounded by writers + 2 layers' rows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/thread_pool.h"
#include "kvstore/format/context_id.h"
#include "kvstore/index/auto_index.h"
#include "kvstore/index/index.h"
#include "prefill/layer_rows.h"
#include "prefill/staging.h"

namespace carrel::kvstore {
class Accelerator;
class SstWriter;
struct HeadFidelity;
struct ProbeQueries;
}  // namespace carrel::kvstore
namespace carrel::v1 {
class Manifest;
}

namespace carrel::prefill {

struct LayerWriterOptions {
  // Queries of each q head whose exact attention is described in the manifest; 0: none is.
  int64_t statistics_samples = 64;
  // Of the queries of each q head, evenly spread, those that are written; 0: all. Others teach and
  // measure only.
  int64_t kept_queries = 0;
  int writers = 1;
  // Files into which the rows of a layer go, written at the same time, as many for K as for V; 0:
  // all of the layer is one file. Even, 0 .. Staging::kMaxSstParts.
  int row_files = 0;
  // The same of the last layer, beside which nothing is computed; 0 if and only if row_files is.
  int last_row_files = 0;
  kvstore::Accelerator* accelerator = nullptr;  // outlives the writer; null: the CPU builds all
  // Asked before each fragment is written; what it refuses is not finished. Null: nothing to ask.
  std::function<absl::Status()> still_right;
};

// Thread-seconds, over all layers so far.
struct LayerWriterTimes {
  double indexing = 0;    // indexes and summaries
  double statistics = 0;  // of heads
  double writing = 0;     // files, with their checksums and syncs
};

class LayerWriter {
 public:
  LayerWriter(const Staging* staging, kvstore::ContextId context, const AttentionShape& shape,
              int64_t segment_tokens, kvstore::IndexParams index,
              std::optional<kvstore::AutoIndexConfig> auto_index, int64_t summary_rows,
              ThreadPool* pool, const LayerWriterOptions& options = {});
  ~LayerWriter();

  absl::Status Submit(LayerRows rows);
  // Waits for everything submitted. tell: called here with written(), at first and whenever it grows.
  absl::Status Finish(const std::function<void(int32_t)>& tell = nullptr);
  // Layers before written() are complete on disk.
  int32_t written() const;
  LayerWriterTimes times() const;

 private:
  struct Built;

  void Run();
  void Stop();
  absl::Status Write(const LayerRows& rows);
  void IndexHead(const LayerRows& rows, int32_t head, Built& built);
  static absl::Status MeasureHead(const kvstore::Rows& keys, const kvstore::Rows& values,
                                  const kvstore::SampledQueries& queries,
                                  const kvstore::ProbeQueries& probe, std::string& summaries,
                                  kvstore::HeadFidelity& fidelity);
  void SummariseHead(const LayerRows& rows, int32_t head, Built& built);
  int RowFiles(Layer layer) const;
  // Rows of some heads, all K or all V, into a file of their own.
  absl::Status WritePart(const LayerRows& rows, int part, int64_t* bytes);
  absl::Status WriteRest(const LayerRows& rows, const Built& built, v1::Manifest& fragment);
  void AddTime(double LayerWriterTimes::*what, absl::Time since);

  const Staging& staging_;
  const kvstore::ContextId context_;
  const AttentionShape shape_;
  const int64_t segment_tokens_;
  const kvstore::IndexParams index_;
  const std::optional<kvstore::AutoIndexConfig> auto_index_;  // instead of index_
  const int64_t summary_rows_;                                // 0: no summaries
  ThreadPool* const pool_;
  const LayerWriterOptions options_;

  mutable absl::Mutex mu_;
  std::unique_ptr<LayerRows> waiting_ ABSL_GUARDED_BY(mu_);
  int busy_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int32_t written_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<int32_t> finished_ ABSL_GUARDED_BY(mu_);  // layers after written_ that are complete
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  LayerWriterTimes times_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

}  // namespace carrel::prefill
