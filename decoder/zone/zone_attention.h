// What:   the zone's part of a sequence's attention, wherever the zone lives: store_zone.cc asks a
//         store, host_zone.cc attends to rows mapped here; and what it is made of.
//         Per layer and block of tokens: Prefetch (optional), Start, Finish, then Measure.
// Ownership: client and pool outlive what is made of an opened context; rows are shared.
// Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/select/host_rows.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"
#include "retrieval/session.h"

namespace carrel::decoder {

// How to retrieve, what the store said of the context, and whom to ask. Without a context: no tokens and no client.
struct OpenedContext {
  RetrievalConfig config;                     // what was left to the context is decided
  std::vector<select::Selection> selections;  // [layers]: LayerSelections
  DeviceConfig device;
  std::string content_id;  // empty: it has none
  AttentionShape shape;
  int64_t tokens = 0;
  RowRange zone;
  bool has_summaries = false;  // at the store
  int64_t max_top_k = 0;       // the store's limits
  int64_t max_fetch_rows = 0;
  int64_t max_block = 1;                  // tokens of one query
  std::vector<std::vector<float>> drift;  // StoredDrift (runner/query_drift.h)
  retrieval::Session* client = nullptr;
  ThreadPool* pool = nullptr;
  std::shared_ptr<const HostRows> rows;  // where TakesHostRows and they can be had
};

// What a zone has on every device.
class Zone {
 public:
  explicit Zone(OpenedContext context)
      : context_(std::move(context)), statistics_(StatisticsOf(context_.selections)) {}
  virtual ~Zone() = default;

  virtual void set_reading_prompt(bool reading) { reading_prompt_ = reading; }
  // Gives up what is in flight: the sequence is over or failed.
  virtual void Cancel() {}

 protected:
  const OpenedContext context_;
  const RetrievalConfig& config_ = context_.config;
  const AttentionShape& shape_ = context_.shape;
  const RowRange zone_ = context_.zone;
  bool reading_prompt_ = false;
  std::vector<LayerStatistics> statistics_;  // [layers]
};

class ZoneAttention : public Zone {
 public:
  using Zone::Zone;

  // predicted_q [n, q_heads, head_dim] for `layer`, while the layer before computes.
  virtual absl::Status Prefetch(Layer, const float*, int64_t) { return absl::OkStatus(); }
  virtual absl::Status Start(Layer layer, const float* q, int64_t n) = 0;
  // partial gets the zone's attention, [n, q_heads].
  virtual absl::Status Finish(Layer layer, const float* q, int64_t n, Partial& partial) = 0;

  // After Finish: adds to the statistics what the config wants measured. window [n, q_heads] is of the rows
  // that the decoder holds; without out the error of the output is not measured.
  virtual absl::Status Measure(Layer, const float*, int64_t, const Partial& /*zone*/,
                               const Partial& /*window*/) {
    return absl::OkStatus();
  }

  // Zones with one key, unless it is empty, may be asked for each other's tokens in one question, each token
  // getting the bits that it gets alone: the same rows, chosen in the same way, by as many as are known
  // before; nothing of the answer is kept or measured.
  virtual std::string batch_key() const { return ""; }

  // [layers].
  const std::vector<LayerStatistics>& statistics() const { return statistics_; }
  LayerStatistics& statistics_of(Layer layer) {
    return statistics_[static_cast<size_t>(layer.value())];
  }

 protected:
  ThreadPool* const pool_ = context_.pool;
};

}  // namespace carrel::decoder
