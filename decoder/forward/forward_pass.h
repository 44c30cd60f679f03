// What:   the part of decoding that depends on the device: takes blocks of new tokens through every
//         layer, with the window here and the zone at the store, and gives logits.
// Errors: Run: InvalidArgument a token outside the vocabulary; ResourceExhausted more new tokens
//         than a GPU's window has room for; what the store and the device say. Making one:
//         Unavailable no such device, FailedPrecondition a build without CUDA, Unimplemented a
//         shape that the device's kernels do not run, ResourceExhausted memory.
// Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/thread_pool.h"
#include "decoder/client/store_client.h"
#include "decoder/config.h"
#include "decoder/statistics.h"
#include "model/checkpoint.h"
#include "model/transformer.h"

namespace carrel::decoder {

class HostRows;

class ForwardPass {
 public:
  virtual ~ForwardPass() = default;

  virtual int64_t max_tokens() const = 0;  // of one Run
  virtual absl::Status Run(absl::Span<const TokenId> tokens, Position first_position) = 0;
  // Of the last `count` tokens of the last Run, [count, vocab_size], to host memory.
  virtual absl::Status Logits(int64_t count, float* logits) = 0;
  // The most likely token after the last Run; Internal if a logit is NaN.
  virtual absl::StatusOr<TokenId> Greedy() = 0;

  virtual void set_reading_prompt(bool reading) = 0;
  // Forgets everything since the context.
  virtual void StartSequence() = 0;
  virtual Statistics statistics() const = 0;
};

// Sees every layer's input and attended output. Tests.
using Observer = std::function<void(const model::AttentionInput&, const float* attended)>;

// The client is open and `opened` its reply; sink and local rows are fetched before this returns.
// host_rows: where NeedsHostRows, otherwise null.
// Without a context: a null client and an empty reply. *observer outlives the pass and may change.
absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCpuForwardPass(
    const model::Checkpoint& checkpoint, const RetrievalConfig& config, const v1::OpenReply& opened,
    StoreClient* client, ThreadPool* pool, const Observer* observer,
    std::shared_ptr<const HostRows> host_rows);

// host_rows: what device.zone_in_host copies, or null; not kept.
absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCudaForwardPass(
    const model::Checkpoint& checkpoint, const RetrievalConfig& config, const DeviceConfig& device,
    const v1::OpenReply& opened, StoreClient* client, ThreadPool* pool,
    std::shared_ptr<const HostRows> host_rows);

}  // namespace carrel::decoder
