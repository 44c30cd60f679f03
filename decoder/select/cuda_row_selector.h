// What:   which rows of a zone a token attends to, chosen on a GPU: one method of selector_config.h
//         behind one interface.
// Math:   the rows that the method's CPU selector selects for the same bf16 queries, ties aside.
//         `hash` with stored codes rounds the directions of queries to bf16.
// Source: docs/methods.md.
// Shapes: q [q_heads, head_dim] bf16; rows are counted from the zone's first.
// State:  per layer the rows chosen last. Methods that keep them for several tokens have phases: in
//         phase p what is refreshed more seldom than the p-th of their intervals is kept. Phase 0
//         keeps nothing.
// Errors: Make: InvalidArgument a config or budget that the GPU's kernels do not serve, named;
//         NotFound what the context lacks; ResourceExhausted device memory.
// Ownership: the keys outlive this.
// Threads: one. Select and Enqueue only enqueue and can be captured.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/row_selector.h"
#include "decoder/select/selector_config.h"
#include "kernels/kv_view.h"
#include "kernels/select/code_topk/code_topk.h"
#include "kernels/select/rescore_rows/rescore_rows.h"

namespace carrel::decoder {

// The zone's keys where the GPU reads them: device memory or pinned host memory; with its V rows where
// they are attended to in the same launch.
struct CudaKeys {
  std::vector<kernels::KvView> layers;
  // Of a layer that is empty in `layers`: readable until the next call. Only for methods that read
  // keys while they are made and never after (not MethodType::reads_keys).
  std::function<absl::StatusOr<kernels::KvView>(Layer)> unpack;

  const kernels::KvView& of(Layer layer) const {
    return layers[static_cast<size_t>(layer.value())];
  }
  absl::StatusOr<kernels::KvView> ToMakeOf(Layer layer) const {
    if (of(layer).k != nullptr) return of(layer);
    return unpack(layer);
  }
};

struct CudaZoneShape {
  AttentionShape heads;
  RowRange zone;
  std::vector<int64_t>
      budgets;  // [layers]: Budgets (config.h); of layers with kAllRows nothing is chosen
  // [layers, kv_heads]: what single KV heads take of their layer's budget, where the method orders
  // rows by exact scores (otherwise all take the budget); empty: the budget.
  std::vector<int64_t> head_budgets = {};

  bool dense(Layer layer) const;
  int64_t largest_budget() const;  // of layers that are not dense; 0: all are
};

struct CudaSelection {
  const int32_t* ids = nullptr;  // [kv_heads, stride]
  int64_t stride = 0;
  int64_t rows = 0;                    // of each KV head, or the most of any
  const int32_t* row_count = nullptr;  // [kv_heads], or null: `rows`
  // [q_heads]: rows are the best by max over the group of (score - base), and no other candidate is
  // better; null: they were not chosen so.
  const float* base = nullptr;
  // Of all KV heads where they take different numbers; otherwise -1.
  int64_t total_rows = -1;
};

// Attention to selected rows: out [q_heads, head_dim], lse [q_heads] f32.
struct CudaAttendSelected {
  float* out = nullptr;
  float* lse = nullptr;
};

// Of one token. attend: attention to what it chooses, too; null: not wanted.
struct CudaChoice {
  Layer layer;
  const uint16_t* q = nullptr;
  int64_t phase = 0;
  CudaAttendSelected attend = {};
};

class CudaRowSelector;

// What some sequences' methods enqueue to choose rows of one layer, to be launched at once; what a method's kernels do
// for one sequence only is launched one by one. Each chooses what it would choose alone. What params point to is the
// sequences' own and outlives the launch, which only enqueues and can be captured.
struct CudaChoices {
  std::vector<kernels::CodeTopKParams> by_codes;
  std::vector<std::pair<const CudaRowSelector*, CudaChoice>> alone;
  std::vector<kernels::RescoreRowsParams> by_keys;  // of what these chose

  absl::Status Launch(const cuda::Stream& stream) const;
};

// What a selector is made of; of memory that is only planned: shape and host_rows.
struct CudaSelectorInput {
  const CudaZoneShape& shape;
  const CudaKeys& keys;
  const HostRows* host_rows;  // of MethodType::needs_host_rows, otherwise null
  ThreadPool* pool = nullptr;
  const cuda::Stream* stream = nullptr;
};

// Memory is laid out by its maker (cuda_methods.h).
class CudaRowSelector {
 public:
  virtual ~CudaRowSelector() = default;

  // What it keeps of the zone, once its memory is there. Reads keys and waits for the stream.
  virtual absl::Status Load(const CudaSelectorInput& input) = 0;

  // Adds a choice in a layer that is not dense, to be launched with other sequences'. What it leaves is its
  // selection(layer).
  virtual void Add(const CudaChoice& choice, CudaChoices& to) const;
  // Of what was added to go alone: enqueues it, up to what is chosen by keys.
  virtual absl::Status Enqueue(const CudaChoice&, const cuda::Stream&) const;
  // Whether all of it is launched with others'.
  virtual bool shares_launches() const { return false; }
  // Add, launched.
  absl::Status Select(const CudaChoice& choice, const cuda::Stream& stream) const;
  virtual CudaSelection selection(Layer layer) const = 0;

  // Whether the launch that selects a layer's rows can attend to them: its keys lie in device memory
  // and are read for their scores anyway.
  virtual bool attends(Layer) const { return false; }
  // Its memory is freed with it.
  void Keep(cuda::DeviceArena arena) { arena_ = std::move(arena); }
  // What CudaRowSelectorBytes said.
  int64_t bytes() const { return arena_.bytes(); }

  // Another that chooses among the same keys with a state of its own, and so on another stream at
  // the same time: what this one does; or, to fetch it ahead, as many rows as `ahead` says [layers],
  // kAllRows: nothing is chosen there. Null: the method has none. This outlives it. Takes
  // CudaAnotherBytes.
  absl::StatusOr<std::unique_ptr<CudaRowSelector>> Another(
      const std::vector<int64_t>* ahead = nullptr) const;
  virtual absl::StatusOr<std::unique_ptr<CudaRowSelector>> LayAnother(const std::vector<int64_t>*,
                                                                      cuda::DeviceArena&) const {
    return nullptr;
  }

  virtual int64_t phases() const { return 1; }
  // step: of a generated token, how many were generated before it; or kPromptStep.
  virtual int64_t PhaseOf(int64_t) const { return 0; }

 private:
  cuda::DeviceArena arena_;
};

// Device memory that a selector takes. host_rows: as MakeCudaRowSelector.
absl::StatusOr<int64_t> CudaRowSelectorBytes(const SelectorConfig& config,
                                             const CudaZoneShape& shape, const HostRows* host_rows);

// Device memory of another. InvalidArgument a method that has none.
absl::StatusOr<int64_t> CudaAnotherBytes(const SelectorConfig& config, const CudaZoneShape& shape,
                                         const HostRows* host_rows,
                                         const std::vector<int64_t>* ahead = nullptr);

// host_rows: of MethodType::needs_host_rows, otherwise null. Reads keys and waits for the stream.
absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeCudaRowSelector(
    const SelectorConfig& config, const CudaZoneShape& shape, const CudaKeys& keys,
    const HostRows* host_rows, ThreadPool* pool, const cuda::Stream& stream);

}  // namespace carrel::decoder
