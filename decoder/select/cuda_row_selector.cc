#include "decoder/select/cuda_row_selector.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/select/cuda_candidates.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/method_type.h"

namespace carrel::decoder {

#define CARREL_METHOD(Name)
#define CARREL_GPU_METHOD(Name)                                                    \
  CudaRowSelectorOr LayCuda##Name(const SelectorConfig&, const CudaSelectorInput&, \
                                  cuda::DeviceArena&);
#include "decoder/select/methods.def"
#undef CARREL_METHOD
#undef CARREL_GPU_METHOD

namespace {

// Plans a selector, and makes it over what that takes. Null if lay gives that.
template <typename Lay>
CudaRowSelectorOr LaidOut(Lay lay) {
  cuda::DeviceArena plan;
  RETURN_IF_ERROR(lay(plan).status());
  ASSIGN_OR_RETURN(cuda::DeviceArena arena, cuda::DeviceArena::Create(plan));
  ASSIGN_OR_RETURN(std::unique_ptr<CudaRowSelector> selector, lay(arena));
  if (selector != nullptr) selector->Keep(std::move(arena));
  return selector;
}

// The methods that run on a GPU, validated.
CudaRowSelectorOr Lay(const SelectorConfig& config, const CudaSelectorInput& input,
                      cuda::DeviceArena& arena) {
  RETURN_IF_ERROR(MethodOf(config).ValidateCuda(config));
#define CARREL_METHOD(Name) nullptr,
#define CARREL_GPU_METHOD(Name) &LayCuda##Name,
  static constexpr decltype(&LayCudaExact) lays[] = {
#include "decoder/select/methods.def"
  };
#undef CARREL_METHOD
#undef CARREL_GPU_METHOD
  return lays[static_cast<size_t>(config.kind)](config, input, arena);
}

SelectorConfig ResolvedFor(const CudaZoneShape& shape, const SelectorConfig& config) {
  return WithOversample(config, CudaOversample(kAutoOversample, shape));
}

}  // namespace

bool CudaZoneShape::dense(Layer layer) const {
  const int64_t budget = budgets[static_cast<size_t>(layer.value())];
  return budget == kAllRows || budget >= zone.rows();
}

int64_t CudaZoneShape::largest_budget() const {
  int64_t largest = 0;
  for (Layer layer(0); layer.value() < heads.layers; layer = layer.next()) {
    if (!dense(layer)) largest = std::max(largest, budgets[static_cast<size_t>(layer.value())]);
  }
  return largest;
}

// cudaMemcpy from pageable memory returns before the bytes have arrived, cudaMemset before it ran;
// our streams do not wait for the default one.
absl::Status CopyToDevice(void* to, const void* from, size_t bytes) {
  RETURN_IF_CUDA_ERROR(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));
  return absl::OkStatus();
}

CudaHeadBudgets::CudaHeadBudgets(const CudaZoneShape& shape, cuda::DeviceArena& arena)
    : kv_heads_(shape.heads.kv_heads),
      device_rows_(arena.Take<int32_t>(static_cast<int64_t>(shape.head_budgets.size()))) {
  if (shape.head_budgets.empty()) return;
  totals_.resize(shape.budgets.size());
  for (size_t i = 0; i < shape.head_budgets.size(); ++i) {
    const size_t layer = i / static_cast<size_t>(kv_heads_);
    // Of a dense layer nothing is read.
    const int64_t most = std::max<int64_t>(shape.budgets[layer], 1);
    const int64_t wanted = std::clamp<int64_t>(shape.head_budgets[i], 1, most);
    rows_.push_back(static_cast<int32_t>(std::min<int64_t>(wanted, shape.zone.rows())));
    totals_[layer] += rows_.back();
  }
}

absl::Status CudaHeadBudgets::Load() const { return CopyToDevice(device_rows_, rows_); }

int64_t CudaHeadBudgets::total(Layer layer) const {
  return totals_.empty() ? -1 : totals_[static_cast<size_t>(layer.value())];
}

absl::StatusOr<int64_t> CudaRowSelectorBytes(const SelectorConfig& config,
                                             const CudaZoneShape& shape,
                                             const HostRows* host_rows) {
  cuda::DeviceArena plan;
  RETURN_IF_ERROR(Lay(ResolvedFor(shape, config), {shape, CudaKeys(), host_rows}, plan).status());
  return plan.bytes();
}

absl::Status CudaChoices::Launch(const cuda::Stream& stream) const {
  RETURN_IF_CUDA_ERROR(kernels::CodeTopK(by_codes, stream.get()));
  for (const auto& [selector, choice] : alone) {
    RETURN_IF_ERROR(selector->Enqueue(choice, stream));
  }
  RETURN_IF_CUDA_ERROR(kernels::RescoreRows(by_keys, stream.get()));
  return absl::OkStatus();
}

void CudaRowSelector::Add(const CudaChoice& choice, CudaChoices& to) const {
  to.alone.emplace_back(this, choice);
}

absl::Status CudaRowSelector::Enqueue(const CudaChoice& choice, const cuda::Stream&) const {
  return absl::InternalError(
      absl::StrCat("layer ", choice.layer.value(), ": its method enqueues nothing by itself"));
}

absl::Status CudaRowSelector::Select(const CudaChoice& choice, const cuda::Stream& stream) const {
  CudaChoices choices;
  Add(choice, choices);
  return choices.Launch(stream);
}

absl::StatusOr<std::unique_ptr<CudaRowSelector>> CudaRowSelector::Another(
    const std::vector<int64_t>* ahead) const {
  return LaidOut([&](cuda::DeviceArena& arena) { return LayAnother(ahead, arena); });
}

absl::StatusOr<int64_t> CudaAnotherBytes(const SelectorConfig& config, const CudaZoneShape& shape,
                                         const HostRows* host_rows,
                                         const std::vector<int64_t>* ahead) {
  if (!MethodOf(config).forks())
    return absl::InvalidArgumentError("only method=hash chooses on two streams at once");
  cuda::DeviceArena of_first, plan;
  ASSIGN_OR_RETURN(const auto first,
                   Lay(ResolvedFor(shape, config), {shape, CudaKeys(), host_rows}, of_first));
  RETURN_IF_ERROR(first->LayAnother(ahead, plan).status());
  return plan.bytes();
}

absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeCudaRowSelector(
    const SelectorConfig& given, const CudaZoneShape& shape, const CudaKeys& keys,
    const HostRows* host_rows, ThreadPool* pool, const cuda::Stream& stream) {
  const SelectorConfig config = ResolvedFor(shape, given);
  CARREL_CHECK(!MethodOf(config).needs_host_rows(config) || host_rows != nullptr);
  const CudaSelectorInput input{shape, keys, host_rows, pool, &stream};
  ASSIGN_OR_RETURN(auto selector, LaidOut([&](auto& arena) { return Lay(config, input, arena); }));
  RETURN_IF_ERROR(selector->Load(input));
  return selector;
}

}  // namespace carrel::decoder
