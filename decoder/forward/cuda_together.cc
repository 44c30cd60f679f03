#include "decoder/forward/cuda_together.h"

#include <algorithm>
#include <cmath>
#include <list>

#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/zone/cuda_zone_work.h"
#include "kernels/attention/merge_states/merge_states_cuda.h"
#include "kernels/select/argmax/argmax_cuda.h"

namespace carrel::decoder {
namespace {

// Steps of the same members before the next becomes a graph: to make one takes as long as some steps.
constexpr int64_t kRepeatedForGraph = 8;

bool AsksHost(absl::Span<const CudaTogether::Member> members) {
  return std::any_of(members.begin(), members.end(),
                     [](const auto& member) { return member.zone->asks_host(); });
}

}  // namespace

CudaTogether::Memory::Memory(const model::ModelConfig& config, cuda::DeviceArena& arena) {
  const int64_t heads = kMembers * config.shape.q_heads, floats = heads * config.shape.head_dim;
  table = arena.Take<Table>(1);
  best = arena.Take<int32_t>(kMembers);
  hidden = arena.Take<float>(kMembers * config.hidden_size);
  q_exact = arena.Take<float>(floats);
  logits = arena.Take<float>(kMembers * config.vocab_size);
  no_lse = arena.Take<float>(heads);
  for (CudaPartial* of : {&window, &zone}) {
    of->out = arena.Take<float>(floats);
    of->lse = arena.Take<float>(heads);
  }
  q = arena.Take<uint16_t>(floats);
  attended = arena.Take<uint16_t>(floats);
}

CudaTogether::CudaTogether(const model::ModelConfig& config)
    : config_(config),
      scale_(1.0f / std::sqrt(static_cast<float>(config.shape.head_dim))),
      memory_(config, plan_) {}

absl::StatusOr<std::shared_ptr<CudaTogether>> CudaTogether::Of(
    const model::ModelConfig& config, const std::shared_ptr<const model::CudaWeights>& weights) {
  static absl::Mutex mu;
  static auto* const all = new std::list<std::weak_ptr<CudaTogether>>;
  absl::MutexLock lock(&mu);
  for (auto one = all->begin(); one != all->end();) {
    const std::shared_ptr<CudaTogether> held = one->lock();
    if (held != nullptr && held->backend_->weights() == weights) return held;
    one = held == nullptr ? all->erase(one) : std::next(one);
  }
  std::shared_ptr<CudaTogether> made(new CudaTogether(config));
  RETURN_IF_ERROR(made->Allocate(weights));
  all->push_back(made);
  return made;
}

absl::Status CudaTogether::Allocate(const std::shared_ptr<const model::CudaWeights>& weights) {
  reserved_ =
      model::GpuReservation(plan_.bytes() + model::CudaBackend::ScratchBytes(config_, kMembers));
  ASSIGN_OR_RETURN(backend_, model::CudaBackend::Create(config_, weights, kMembers));
  ASSIGN_OR_RETURN(arena_, cuda::DeviceArena::Create(plan_));
  memory_ = Memory(config_, arena_);
  for (int64_t i = 0; i < kStreams; ++i) {
    ASSIGN_OR_RETURN(cuda::Stream stream, cuda::Stream::Create());
    streams_.push_back(std::move(stream));
    ASSIGN_OR_RETURN(cuda::Event attended, cuda::Event::Create());
    attended_.push_back(std::move(attended));
  }
  ASSIGN_OR_RETURN(projected_, cuda::Event::Create());
  ASSIGN_OR_RETURN(host_table_, cuda::PinnedBuffer<Table>::Create(1));
  ASSIGN_OR_RETURN(host_best_, cuda::PinnedBuffer<int32_t>::Create(kMembers));
  ASSIGN_OR_RETURN(host_logits_, cuda::PinnedBuffer<float>::Create(config_.vocab_size));
  const std::vector<float> nothing(static_cast<size_t>(kMembers * config_.shape.q_heads),
                                   -INFINITY);
  RETURN_IF_CUDA_ERROR(cudaMemcpy(memory_.no_lse, nothing.data(), nothing.size() * sizeof(float),
                                  cudaMemcpyHostToDevice));
  RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // our streams do not wait for that one
  return absl::OkStatus();
}

CudaQueries CudaTogether::Queries(size_t i) const {
  const int64_t at = static_cast<int64_t>(i) * width();
  return {memory_.q_exact + at, memory_.q + at, 1};
}

CudaPartial CudaTogether::ZoneOf(size_t i) const {
  const auto at = static_cast<int64_t>(i);
  return {memory_.zone.out + at * width(), memory_.zone.lse + at * config_.shape.q_heads};
}

absl::StatusOr<int64_t> CudaTogether::Step(absl::Span<const Member> members,
                                           std::vector<TokenId>& best) {
  const cuda::Range range("tokens together");
  CARREL_CHECK(!members.empty() && static_cast<int64_t>(members.size()) <= kMembers);
  absl::MutexLock lock(&mu_);
  ++step_;
  FillTable(members);
  const absl::Status launched = Launch(members);
  // Whatever was enqueued reads what the caller may free now.
  absl::Status done = main().Synchronize();
  for (const cuda::Stream& stream : streams_) done.Update(stream.Synchronize());
  RETURN_IF_ERROR(launched);
  RETURN_IF_ERROR(done);
  best.assign(host_best_.data(), host_best_.data() + members.size());
  return step_;
}

absl::StatusOr<bool> CudaTogether::CopyLogits(int64_t step, int64_t i, float* logits) {
  absl::MutexLock lock(&mu_);
  if (step != step_) return false;
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_logits_.data(), memory_.logits + i * config_.vocab_size,
                                       static_cast<size_t>(host_logits_.bytes()),
                                       cudaMemcpyDeviceToHost, main().get()));
  RETURN_IF_ERROR(main().Synchronize());
  std::copy_n(host_logits_.data(), config_.vocab_size, logits);
  return true;
}

void CudaTogether::FillTable(absl::Span<const Member> members) {
  Table& table = *host_table_.data();
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    table.ids[i] = member.token;
    table.window_rows[i] = static_cast<int32_t>(member.row + 1);
    table.rows[i] = {member.position, member.row, member.window->kv(Layer(0)),
                     member.window->layer_stride()};
  }
}

absl::Status CudaTogether::Launch(absl::Span<const Member> members) {
  std::vector<std::pair<int64_t, int64_t>> these;
  for (const Member& member : members) these.emplace_back(member.id, member.phase);
  if (these != members_) {
    members_ = std::move(these);
    repeated_ = 0;
    graph_ = cuda::Graph();
    return Enqueue(members);
  }
  ++repeated_;
  if (repeated_ < kRepeatedForGraph || AsksHost(members)) return Enqueue(members);
  if (repeated_ == kRepeatedForGraph) {
    ASSIGN_OR_RETURN(graph_, cuda::Graph::Capture(main(), [&] { return Enqueue(members); }));
  }
  return graph_.Launch(main());
}

absl::Status CudaTogether::Enqueue(absl::Span<const Member> members) const {
  const auto n = static_cast<int64_t>(members.size());
  const bool asks = AsksHost(members);
  RETURN_IF_ERROR(Begin(n));
  for (Layer layer(0); layer.value() < config_.shape.layers; layer = layer.next()) {
    RETURN_IF_ERROR(Project(layer, members));
    RETURN_IF_ERROR(Attend(layer, members));
    if (asks) RETURN_IF_ERROR(Answer(layer, members));
    for (size_t i = 0; i < std::min<size_t>(members.size(), kStreams); ++i) {
      RETURN_IF_ERROR(attended_[i].Record(streams_[i]));
      RETURN_IF_ERROR(main().WaitFor(attended_[i]));
    }
    RETURN_IF_ERROR(FinishLayer(layer, n));
  }
  return End(members);
}

absl::Status CudaTogether::Begin(int64_t n) const {
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.table, host_table_.data(), sizeof(Table),
                                       cudaMemcpyHostToDevice, main().get()));
  // Where there is no zone nobody writes there.
  RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(memory_.zone.lse, memory_.no_lse,
                      static_cast<size_t>(n * config_.shape.q_heads) * sizeof(float),
                      cudaMemcpyDeviceToDevice, main().get()));
  return backend_->Embed(memory_.table->ids, n, memory_.hidden);
}

absl::Status CudaTogether::Project(Layer layer, absl::Span<const Member> members) const {
  model::CudaPlacement placement;
  placement.rows = memory_.table->rows;
  RETURN_IF_ERROR(backend_->ProjectQkv(layer, memory_.hidden, static_cast<int64_t>(members.size()),
                                       placement, memory_.q, memory_.q_exact));
  for (size_t i = 0; i < members.size(); ++i) {
    RETURN_IF_ERROR(members[i].zone->TakeQueries(layer, Queries(i), main()));
  }
  for (const Member& member : members) RETURN_IF_ERROR(member.zone->QueriesEnqueued(main()));
  return absl::OkStatus();
}

absl::Status CudaTogether::Attend(Layer layer, absl::Span<const Member> members) const {
  RETURN_IF_ERROR(projected_.Record(main()));
  for (size_t i = 0; i < std::min<size_t>(members.size(), kStreams); ++i) {
    RETURN_IF_ERROR(streams_[i].WaitFor(projected_));
  }
  const size_t n = members.size();
  std::vector<std::vector<kernels::WindowAttentionCudaParams>> windows(Shares(n));
  std::vector<CudaZoneWork> work(Shares(n));
  for (size_t i = 0; i < n; ++i) {
    const Member& member = members[i];
    windows[ShareOf(i, n)].push_back(WindowOf(layer, member, i));
    if (member.zone->asks_host()) continue;
    if (member.zone->AddWork(layer, Queries(i).rounded, ZoneOf(i), work[ShareOf(i, n)])) continue;
    RETURN_IF_ERROR(member.zone->Attend(layer, Queries(i), member.phase, ZoneOf(i), StreamOf(i)));
  }
  for (size_t share = 0; share < work.size(); ++share) {
    const cuda::Stream& stream = ShareStream(share);
    RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(windows[share], stream.get()));
    RETURN_IF_ERROR(work[share].Launch(stream));
  }
  for (size_t i = 0; i < n; ++i) {
    const float* lse = memory_.window.lse + static_cast<int64_t>(i) * config_.shape.q_heads;
    RETURN_IF_ERROR(members[i].zone->TakeWindow(layer, lse, 1, ShareStream(ShareOf(i, n))));
  }
  return absl::OkStatus();
}

kernels::WindowAttentionCudaParams CudaTogether::WindowOf(Layer layer, const Member& member,
                                                          size_t i) const {
  const AttentionShape& heads = config_.shape;
  const auto at = static_cast<int64_t>(i);
  kernels::WindowAttentionCudaParams params;
  params.q = memory_.q + at * width();
  params.kv = member.window->kv(layer);
  params.kv_heads = heads.kv_heads;
  params.group = heads.group();
  params.head_dim = heads.head_dim;
  params.row_count = memory_.table->window_rows + i;
  params.scale = scale_;
  params.out = memory_.window.out + at * width();
  params.lse = memory_.window.lse + at * heads.q_heads;
  params.splits = member.splits;
  params.workspace = member.workspace;
  return params;
}

// All questions are on their way before the first answer is waited for.
absl::Status CudaTogether::Answer(Layer layer, absl::Span<const Member> members) const {
  for (const Member& member : members) {
    if (member.status->ok()) *member.status = member.zone->Ask(layer, 1);
  }
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    if (!member.zone->asks_host()) continue;
    const cuda::Stream& stream = ShareStream(ShareOf(i, members.size()));  // of its window
    if (member.status->ok()) *member.status = member.zone->Answer(layer, 1, stream);
    if (!member.status->ok()) continue;
    RETURN_IF_ERROR(member.zone->Attend(layer, Queries(i), member.phase, ZoneOf(i), stream));
  }
  return absl::OkStatus();
}

absl::Status CudaTogether::FinishLayer(Layer layer, int64_t n) const {
  kernels::MergeStatesCudaParams merge;
  merge.out_a = memory_.window.out;
  merge.lse_a = memory_.window.lse;
  merge.out_b = memory_.zone.out;
  merge.lse_b = memory_.zone.lse;
  merge.out_bf16 = memory_.attended;
  merge.heads = n * config_.shape.q_heads;
  merge.head_dim = config_.shape.head_dim;
  RETURN_IF_CUDA_ERROR(kernels::MergeStatesCuda(merge, main().get()));
  return backend_->FinishLayer(layer, memory_.attended, n, memory_.hidden);
}

absl::Status CudaTogether::End(absl::Span<const Member> members) const {
  const auto n = static_cast<int64_t>(members.size());
  RETURN_IF_ERROR(backend_->Logits(memory_.hidden, n, memory_.logits));
  RETURN_IF_CUDA_ERROR(
      kernels::ArgmaxCuda(memory_.logits, n, config_.vocab_size, memory_.best, main().get()));
  RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_best_.data(), memory_.best,
                                       static_cast<size_t>(n) * sizeof(int32_t),
                                       cudaMemcpyDeviceToHost, main().get()));
  for (int64_t i = 0; i < n; ++i) {
    const Member& member = members[static_cast<size_t>(i)];
    RETURN_IF_ERROR(member.zone->CopyCounters(main()));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(member.hidden, memory_.hidden + i * config_.hidden_size,
                                         static_cast<size_t>(config_.hidden_size) * sizeof(float),
                                         cudaMemcpyDeviceToDevice, main().get()));
  }
  return absl::OkStatus();
}

}  // namespace carrel::decoder
