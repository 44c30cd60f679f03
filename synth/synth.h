// What:   a context of any shape and length, made from what is measured on a real one, written as
//         prefill writes: layer by layer, an SST each, published at once. For measurements at
//         scales for which there is no model at hand.
// Edge:   layers map to the source's by relative depth, KV heads in turn. Its fingerprint says
//         "synthetic", which no model's does: a decoder refuses it.
// Errors: InvalidArgument a shape, length or name, or a source too short to measure; AlreadyExists
//         the name; ResourceExhausted disk full. A failed or interrupted run leaves nothing
//         visible; the next of the same name starts over.
// Cost:   memory: up to three layers' rows, or one if a layer is beyond kWaitBytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/progress.h"
#include "common/thread_pool.h"
#include "kvstore/index/auto_index.h"
#include "kvstore/index/index.h"
#include "synth/head_model.h"

namespace carrel::kvstore {
class Store;
class StoredContext;
}  // namespace carrel::kvstore

namespace carrel::synth {

// Rows of a layer above which the next is drawn only when this one is written.
inline constexpr int64_t kWaitBytes = int64_t{2} << 30;

struct SynthConfig {
  std::string store_folder;  // where staging goes: of the Store that is passed
  std::string name;
  int64_t tokens = 0;     // 128 .. 2^24
  AttentionShape shape;   // 0s: the source's; head_dim even
  double rope_theta = 0;  // 0: the source's
  kvstore::IndexParams index;
  std::optional<kvstore::AutoIndexConfig> auto_index;  // instead of index
  int64_t summary_rows = 40;                           // rows per cluster of the summaries; 0: none
  int64_t segment_tokens = 65536;
  int64_t sampled_queries = 256;  // per layer and q head, 1 .. 65536
  uint64_t seed = 1;
};

struct LayerFit {
  int32_t layer = 0;
  int32_t source_layer = 0;
  HeadFit source, made;  // means over KV heads
};

struct SynthReport {
  AttentionShape shape;
  std::vector<LayerFit> layers;
  double seconds = 0;
  double draw_seconds = 0;  // of which rows and queries, without waiting for the writer
  int64_t stored_bytes = 0;
  int64_t index_bytes = 0;
};

absl::StatusOr<SynthReport> RunSynth(const SynthConfig& config,
                                     const kvstore::StoredContext& source, kvstore::Store& store,
                                     ThreadPool* pool, Progress& progress);

}  // namespace carrel::synth
