// What:   the prefill job: document -> hidden states -> layer by layer K, V, index, SST -> one
//         published context.
// Source: layer-major order (docs/architecture.md, section 1): all tokens pass layer l before any
//         passes l + 1, so that a layer's K and V are final at once.
// Errors: AlreadyExists the name is taken; InvalidArgument an empty document, one that leaves no
//         position below max_position_embeddings for a prompt, a token outside the vocabulary; Unavailable no GPU,
//         ResourceExhausted one with too little memory, FailedPrecondition a build without CUDA, if
//         the device is one; FailedPrecondition the store is locked, or an interrupted job of this
//         name had another input, or is running; ResourceExhausted (MakeDiskFull) disk full, checked
//         before the work starts, and met at any write, after which nothing of the job stays unless
//         keep_when_full; DataLoss rows that are not what the model computes, InvalidArgument a model
//         whose weights hold NaN (recheck.h), after which nothing of the job stays, either. After any
//         other failure and after kill -9 the finished layers stay in the staging folder
//         (kvstore/storage/unfinished.h) and the same call goes on from there. (On a GPU the last minute before an
//         interruption may be lost: a hidden state is written once a minute.)
// Cost:   memory: 4 bytes * tokens * hidden_size, and of one layer 8 + up to 3 * 4 bytes * tokens *
//         kv_heads * head_dim; weights stay mapped.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/progress.h"
#include "common/thread_pool.h"
#include "kvstore/index/auto_index.h"
#include "kvstore/index/index.h"
#include "model/checkpoint.h"
#include "model/device.h"
#include "prefill/attention_config.h"
#include "prefill/layer_forward.h"
#include "prefill/layer_writer.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::kvstore {
class Store;
}

namespace carrel::prefill {

// Files of a layer that is computed and sealed, in order of keys, and the place of the first of them
// among those of the context. They may be moved once the call has returned; what was opened stays.
struct SealedLayer {
  std::string context_id;  // bytes
  int64_t first_file = 0;
  std::vector<std::string> paths;
};

struct PrefillConfig {
  std::string store_folder;  // where staging goes: of the Store that is passed
  std::string name;
  kvstore::IndexParams index;
  std::optional<kvstore::AutoIndexConfig>
      auto_index;  // instead of index: chosen per layer and KV head
  int64_t summary_rows =
      40;  // mean rows of a cluster in the summaries for the estimation term, 4 .. 8192; 0: none
  int64_t segment_tokens = 65536;  // rows per stored segment, a power of two >= 16
  // Per layer and q head: so many teach indexes, measure and are kept, 1 .. 65536. None: 256 teach and
  // measure, and one per 16 tokens is kept, 16 to 256.
  std::optional<int64_t> sampled_queries;
  int64_t block_tokens =
      512;  // tokens that pass a layer together; a multiple of 64: scratch memory against overhead.
            // On a CPU of many cores more, some for each
  AttentionConfig attention;
  bool beyond_trained = false;  // rope trained: the document may be longer than the model was
                                // trained for (max_position_embeddings)
  model::Device device = model::Device::kCpu;
  int64_t gpu_memory = model::kAllGpuMemory;  // bound on the bytes of a GPU's memory
  bool restart = false;  // discard an interrupted job instead of going on with it
  // What becomes of the finished layers when the disk is full: they stay for the next run, or go.
  bool keep_when_full = false;
  // Seconds between hidden states that are kept, as places to go on from; < 0: on a CPU every layer's,
  // but of large ones no more than a twentieth of the time allows; one a minute on a GPU, which passes
  // through a layer in less time than one takes to write.
  double hidden_interval_s = -1;
  // Drawn from the document when all is sealed, computed once more and compared (recheck.h), where
  // CanRecheck; 0: none.
  int64_t recheck_tokens = 16;
  // What comes behind the document where somebody asks about it, in the model's chat template (serving/
  // chat_probe.h): fidelity is measured on it (model/tokenizer/probe.h). None: plain questions, where
  // the model has a tokenizer; empty: on the document's own queries alone. What does not fit behind it
  // is cut.
  std::optional<std::vector<TokenId>> probe;
  // Told of each layer, in order, by the job's thread, soon after it is sealed; null: nobody.
  std::function<void(const SealedLayer&)> sealed;
  // Asked after each block of tokens; false ends the job (Cancelled), which can be gone on with.
  std::function<bool()> wanted;
};

struct PrefillReport {
  int64_t tokens = 0;
  int64_t probe_tokens = 0;    // behind the document; 0: fidelity was measured on its own queries
  int32_t resumed_layers = 0;  // taken over from an interrupted job
  double seconds = 0;
  double tokens_per_s = 0;        // document tokens per second, over the layers computed now
  int64_t peak_memory_bytes = 0;  // of the process (resident set)
  int64_t stored_bytes = 0;
  int64_t index_bytes = 0;
  int64_t summary_bytes = 0;
  int64_t device_bytes = 0;       // of a GPU's memory
  double compute_seconds = 0;     // until the last layer was computed
  double index_wait_seconds = 0;  // that computing or the end waited for indexes and files
  int64_t recheck_tokens = 0;     // computed once more
  uint64_t recheck_seed = 0;      // that drew them
  double recheck_seconds = 0;
  double recheck_worst = 0;  // of any of their rows, the share of what rounding allows
  double publish_seconds = 0;
  ForwardTimes times;       // of the device
  LayerWriterTimes writer;  // beside it, summed over threads
};

// Records in the manifest how its heads are indexed and summarised.
void SetIndexPlan(const kvstore::IndexParams& index,
                  const std::optional<kvstore::AutoIndexConfig>& auto_index, int64_t summary_rows,
                  v1::Manifest& manifest);

// Adds up what the manifest says of its layers.
void CountBytes(const v1::Manifest& manifest, PrefillReport& report);

absl::StatusOr<PrefillReport> RunPrefill(const PrefillConfig& config,
                                         const model::Checkpoint& checkpoint,
                                         const std::vector<TokenId>& tokens, kvstore::Store& store,
                                         ThreadPool* pool, Progress& progress);

}  // namespace carrel::prefill
