#include "decoder/select/cuda_candidates.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/key_scores.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

// Candidates of a layer that is not dense.
int64_t CountOf(const CudaZoneShape& shape, int64_t budget, int64_t oversample) {
  const int64_t count = CandidateCount(budget, oversample, shape.zone);
  if (oversample != kAutoOversample) return count;
  return std::max(budget, std::min(count, kernels::MostRescoredRows(shape.heads.group())));
}

// The most candidates of any layer of which some are left out again; 0: there are none.
int64_t MostCandidates(const CudaZoneShape& shape, int64_t oversample) {
  int64_t most = 0;
  for (Layer layer(0); layer.value() < shape.heads.layers; layer = layer.next()) {
    if (shape.dense(layer)) continue;
    const int64_t budget = shape.budgets[static_cast<size_t>(layer.value())];
    const int64_t count = CountOf(shape, budget, oversample);
    if (count > budget) most = std::max(most, count);
  }
  return most;
}

}  // namespace

int64_t CudaOversample(int64_t configured, const CudaZoneShape& shape) {
  if (configured != kAutoOversample) return configured;
  const int64_t most = kernels::MostRescoredRows(shape.heads.group());
  int64_t oversample = kOversample;
  while (oversample > 1 && MostCandidates(shape, oversample) > most) --oversample;
  return oversample;
}

absl::StatusOr<CudaCandidates> CudaCandidates::Lay(const char* method, const CudaZoneShape& shape,
                                                   int64_t oversample, const CudaKeys& keys,
                                                   cuda::DeviceArena& arena) {
  const int64_t candidates = MostCandidates(shape, oversample);
  const int64_t most = kernels::MostRescoredRows(shape.heads.group());
  if (candidates > most) {
    return absl::InvalidArgumentError(absl::StrCat(
        "method=", method, ": oversample=", oversample, " makes ", candidates,
        " candidates of a layer's budget of ", shape.largest_budget(), " rows; a GPU re-scores ",
        most, " for ", shape.heads.group(), " q heads per KV head"));
  }
  CudaCandidates out;
  out.shape_ = shape;
  out.oversample_ = oversample;
  out.keys_ = keys;
  out.LayIds(arena);
  if (candidates > 0) out.head_budgets_ = CudaHeadBudgets(shape, arena);
  return out;
}

CudaCandidates CudaCandidates::LayAnother(cuda::DeviceArena& arena) const {
  CudaCandidates another = *this;
  another.LayIds(arena);
  return another;
}

void CudaCandidates::LayIds(cuda::DeviceArena& arena) {
  const int64_t candidates = MostCandidates(shape_, oversample_);
  if (candidates == 0) return;
  ids_ = arena.Take<int32_t>(shape_.heads.kv_heads * candidates);
  base_ = arena.Take<float>(shape_.heads.q_heads);
}

int64_t CudaCandidates::Count(Layer layer) const {
  return CountOf(shape_, shape_.budgets[layer.value()], oversample_);
}

int32_t* CudaCandidates::Ids(Layer layer, int32_t* chosen) const {
  return rescores(layer) ? ids_ : chosen;
}

CudaSelection CudaCandidates::selection(Layer layer, const int32_t* chosen) const {
  const int64_t budget = shape_.budgets[layer.value()];
  if (!rescores(layer)) return {chosen, budget, budget};
  return {chosen, budget, budget, head_budgets_.of(layer), base_, head_budgets_.total(layer)};
}

void CudaCandidates::AddKept(const CudaChoice& choice, int32_t* chosen, CudaChoices& to) const {
  const Layer layer = choice.layer;
  if (!rescores(layer)) return;
  auto params = kernels::OfHeads<kernels::RescoreRowsParams>(shape_.heads);
  params.q = choice.q;
  params.kv = keys_.of(layer);
  params.candidates = ids_;
  params.candidate_stride = params.count = Count(layer);
  params.wanted = shape_.budgets[layer.value()];
  params.wanted_of_head = head_budgets_.of(layer);
  params.ids = chosen;
  params.base = base_;
  params.out = choice.attend.out;
  params.lse = choice.attend.lse;
  to.by_keys.push_back(params);
}

}  // namespace carrel::decoder
