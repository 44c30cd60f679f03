// What:   the runner of a GPU. Weights are read once for all tokens of a step; RoPE, window and zone are each
//         sequence's own. Windows and zones of a share of the sequences are launched at once
//         (zone/cuda_zone_attention.h), shares side by side on streams. A step of the same sequences, one token
//         each, becomes a graph: of one alone when it is opened, of several after some steps; where a zone
//         asks this host, the graphs of one end there.
// Bits:   as runner.h (CudaBackend::tokens_alike).
// Errors: those of a zone are its sequence's own, in its status: what it computes from there on means
//         nothing. What else fails is the device's, and everybody's.
// Ownership: as runner.h; keeps nothing of a sequence after Step but the graph of the last ones.
// Threads: any; one step, or capture, at a time.
// Cost:   Hold allocates all memory: weights, if nobody holds them, and what steps need.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/range.h"
#include "common/cuda/status.h"
#include "common/status.h"
#include "decoder/runner/cuda_sequence.h"
#include "decoder/runner/runner.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/shared.h"
#include "kernels/attention/merge_states/merge_states_cuda.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/layer/rope/rope_cuda.h"
#include "kernels/most_together.h"
#include "kernels/select/argmax/argmax_cuda.h"
#include "model/cuda_backend.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kBlockTokens = CudaSequence::kBlockTokens;
// Steps of the same members before the next becomes a graph: to make one takes as long as some steps.
constexpr int64_t kRepeatedForGraph = 8;

struct Member {
  CudaSequence* sequence = nullptr;
  const Slice* slice = nullptr;
  SliceResult* result = nullptr;
  int64_t first = 0, n = 0;  // of the step's tokens
  int64_t phase = 0;         // of the zone

  absl::Status& status() const { return result->status; }
};

using Members = absl::Span<const Member>;

int64_t TokensOf(Members members) { return members.back().first + members.back().n; }

// Sequences that share launches, and their stream: while one share's rows cross the bus, the next one's
// are chosen. What is launched one by one leaves room on the chip for other streams'.
size_t SharesOf(Members members, size_t streams) {
  const size_t n = members.size();
  const bool alone = std::any_of(members.begin(), members.end(),
                                 [](const auto& one) { return one.sequence->zone().adds_alone(); });
  const size_t most = static_cast<size_t>(kernels::kMostTogether);
  return std::max(alone ? std::min(n, streams) : 1, (n + most - 1) / most);
}

bool AsksHost(Members members) {
  return std::any_of(members.begin(), members.end(),
                     [](const auto& one) { return one.sequence->zone().asks_host(); });
}

class CudaRunner final : public Runner {
 public:
  explicit CudaRunner(const model::Checkpoint& checkpoint)
      : checkpoint_(checkpoint),
        config_(checkpoint_.config),
        memory_(config_, plan_),
        own_bytes_(plan_.bytes() + model::CudaBackend::ScratchBytes(config_, kBlockTokens)) {}

  std::vector<SliceResult> Step(absl::Span<const Slice> batch) override {
    const cuda::Range range("step");
    absl::MutexLock lock(&mu_);
    std::vector<SliceResult> results(batch.size());
    std::vector<size_t> those;
    for (size_t i = 0; i < batch.size(); ++i) {
      results[i].status = CheckSlice(batch[i]);
      if (results[i].status.ok()) those.push_back(i);
    }
    for (const std::vector<size_t>& part : PartsOf(batch, those, kMembers)) {
      StepPart(batch, part, results);
    }
    return results;
  }

  // Takes the memory, where that was not done. The pool shares the copying of weights.
  absl::Status Hold(ThreadPool* pool) {
    absl::MutexLock lock(&mu_);
    if (backend_ != nullptr) return absl::OkStatus();
    reserved_ = model::GpuReservation(own_bytes_);
    ASSIGN_OR_RETURN(auto backend,
                     model::CudaBackend::Create(config_, checkpoint_.weights, kBlockTokens, pool,
                                                checkpoint_.adapter));
    ASSIGN_OR_RETURN(arena_, cuda::DeviceArena::Create(plan_));
    memory_ = Memory(config_, arena_);
    for (int64_t i = 1; i < kStreams; ++i) {
      ASSIGN_OR_RETURN(cuda::Stream stream, cuda::Stream::Create());
      streams_.push_back(std::move(stream));
      ASSIGN_OR_RETURN(cuda::Event attended, cuda::Event::Create());
      attended_.push_back(std::move(attended));
    }
    ASSIGN_OR_RETURN(projected_, cuda::Event::Create());
    ASSIGN_OR_RETURN(queries_ready_, cuda::Event::Create());
    ASSIGN_OR_RETURN(host_table_, cuda::PinnedBuffer<Table>::Create(1));
    ASSIGN_OR_RETURN(host_best_, cuda::PinnedBuffer<int32_t>::Create(kMembers));
    ASSIGN_OR_RETURN(host_logits_,
                     cuda::PinnedBuffer<float>::Create(kMembers * config_.vocab_size));
    const std::vector<float> nothing(static_cast<size_t>(kBlockTokens * config_.shape.q_heads),
                                     -INFINITY);
    RETURN_IF_ERROR(CopyToDevice(memory_.no_lse, nothing));
    backend_ = std::move(backend);
    return absl::OkStatus();
  }

  // The device memory that it holds then, and what Hold would take of it now.
  int64_t Bytes() const { return WeightBytes() + own_bytes_; }
  int64_t WeightBytes() const { return model::CudaWeights::Bytes(config_); }
  int64_t MissingBytes() {
    absl::MutexLock lock(&mu_);
    if (backend_ != nullptr) return 0;
    return own_bytes_ +
           model::CudaWeights::SharedBytes(config_, checkpoint_.weights, checkpoint_.adapter);
  }

  // Makes the graphs of a token of it. Runs one first, so that every kernel is loaded.
  absl::Status Capture(CudaSequence& sequence) {
    absl::MutexLock lock(&mu_);
    const TokenId token = 0;
    const Slice slice = {.sequence = &sequence, .tokens = {&token, 1}};
    SliceResult result;
    Member member = {&sequence, &slice, &result, 0, 1, 0};
    FillTable({&member, 1});
    RETURN_IF_ERROR(EachPart({&member, 1}, kUnanswered, [](auto enqueue) { return enqueue(); }));
    RETURN_IF_ERROR(main().Synchronize());
    for (member.phase = 0; member.phase < sequence.zone().phases(); ++member.phase) {
      ASSIGN_OR_RETURN(StepGraphs graphs, CaptureStep({&member, 1}));
      sequence.graphs().push_back(std::move(graphs));
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kMembers = model::CudaBackend::tokens_alike();
  static constexpr int64_t kStreams = 4;  // that attention is spread over, the backend's the first

  // What changes from step to step; of tokens as many are copied as there are.
  struct Table {
    int32_t window_rows[kMembers];  // of each member
    int32_t steps[kMembers];        // where its first token stands, behind its context
    int32_t ids[kBlockTokens];
    kernels::RopeCudaRow rows[kBlockTokens];
  };
  struct Memory {
    Memory(const model::ModelConfig& config, cuda::DeviceArena& arena) {
      const int64_t heads = kBlockTokens * config.shape.q_heads,
                    floats = heads * config.shape.head_dim;
      table = arena.Take<Table>(1);
      best = arena.Take<int32_t>(kMembers);
      hidden = arena.Take<float>(kBlockTokens * config.hidden_size);
      last = arena.Take<float>(kMembers * config.hidden_size);
      q_exact = arena.Take<float>(floats);
      logits = arena.Take<float>(kMembers * config.vocab_size);
      no_lse = arena.Take<float>(heads);
      room = arena.Take<float>(
          std::max(kMembers * room_floats(config),
                   kernels::MostPrefillAttentionRoom(kBlockTokens, config.shape.q_heads,
                                                     config.shape.head_dim)));
      for (CudaPartial* of : {&window, &zone}) {
        of->out = arena.Take<float>(floats);
        of->lse = arena.Take<float>(heads);
      }
      q = arena.Take<uint16_t>(floats);
      attended = arena.Take<uint16_t>(floats);
    }

    Table* table;
    int32_t* best;
    float *hidden, *last, *q_exact, *logits, *no_lse, *room;
    CudaPartial window, zone;
    uint16_t *q, *attended;
  };

  // Of a token's attention in parts, for those that pass beside others.
  static int64_t room_floats(const model::ModelConfig& config) {
    return kernels::kMaxPrefillParts * config.shape.q_heads * (config.shape.head_dim + 1);
  }
  int64_t width() const { return int64_t{config_.shape.q_heads} * config_.shape.head_dim; }
  const cuda::Stream& main() const { return backend_->stream(); }
  const cuda::Stream& StreamOf(size_t share) const {
    return share % kStreams == 0 ? main() : streams_[share % kStreams - 1];
  }
  CudaQueries Queries(const Member& member) const {
    const int64_t at = member.first * width();
    return {memory_.q_exact + at, memory_.q + at, member.n,
            memory_.room + member.first * room_floats(config_)};
  }

  CudaPartial Of(const CudaPartial& partial, const Member& member) const {
    return {partial.out + member.first * width(),
            partial.lse + member.first * config_.shape.q_heads};
  }

  absl::Status CheckSlice(const Slice& slice) const {
    RETURN_IF_ERROR(model::ValidateTokenIds(slice.tokens, config_));
    CARREL_CHECK(slice.sequence->on_cuda() != nullptr);
    return slice.sequence->on_cuda()->Check(slice);
  }

  void StepPart(absl::Span<const Slice> batch, absl::Span<const size_t> part,
                std::vector<SliceResult>& results) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<Member> members;
    int64_t tokens = 0;
    for (const size_t i : part) {
      const auto n = static_cast<int64_t>(batch[i].tokens.size());
      CudaSequence* const sequence = batch[i].sequence->on_cuda();
      results[i].status = sequence->Begin(batch[i], main());
      if (!results[i].status.ok()) continue;
      members.push_back({sequence, &batch[i], &results[i], tokens, n, sequence->phase(n)});
      tokens += n;
    }
    if (members.empty()) return;
    absl::Status status = Run(members);
    if (status.ok()) status = TakeLogits(members);
    for (const Member& one : members) {
      if (!status.ok()) one.status() = status;
      if (one.status().ok()) one.sequence->Passed(*one.slice);
    }
  }

  // Waits for the end. Work that was enqueued elsewhere on what members point to is done.
  absl::Status Run(Members members) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    FillTable(members);
    ASSIGN_OR_RETURN(const StepGraphs* const graphs, GraphsOf(members));
    const absl::Status enqueued = Enqueue(members, graphs);
    // Whatever was enqueued reads what the caller may free now. Other streams have joined, unless it broke off.
    absl::Status done = main().Synchronize();
    for (size_t i = 0; i < streams_.size() && !enqueued.ok(); ++i) {
      done.Update(streams_[i].Synchronize());
    }
    RETURN_IF_ERROR(enqueued);
    return done;
  }

  absl::Status TakeLogits(Members members) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const int64_t vocab = config_.vocab_size;
    for (size_t i = 0; i < members.size(); ++i) {
      const Slice& slice = *members[i].slice;
      if (!members[i].status().ok() || !slice.wants_next) continue;
      if (slice.next_logits != nullptr) {
        RETURN_IF_ERROR(
            CopyLogits(memory_.logits + static_cast<int64_t>(i) * vocab, 1, slice.next_logits));
      } else if (host_best_.data()[i] < 0) {
        members[i].result->next = absl::InternalError("a logit is NaN");
      } else {
        members[i].result->next = host_best_.data()[i];
      }
    }
    for (const Member& one : members) {
      if (!one.status().ok() || one.slice->all_logits == nullptr) continue;
      for (int64_t at = 0; at < one.n; at += kMembers) {
        const int64_t rows = std::min(kMembers, one.n - at);
        RETURN_IF_ERROR(backend_->Logits(memory_.hidden + (one.first + at) * config_.hidden_size,
                                         rows, memory_.logits));
        RETURN_IF_ERROR(CopyLogits(memory_.logits, rows, one.slice->all_logits + at * vocab));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CopyLogits(const float* from, int64_t rows, float* to) {
    const int64_t floats = rows * config_.vocab_size;
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_logits_.data(), from,
                                         static_cast<size_t>(floats) * sizeof(float),
                                         cudaMemcpyDeviceToHost, main().get()));
    RETURN_IF_ERROR(main().Synchronize());
    std::copy_n(host_logits_.data(), floats, to);
    return absl::OkStatus();
  }

  void FillTable(Members members) {
    Table& table = *host_table_.data();
    for (size_t i = 0; i < members.size(); ++i) {
      const Member& one = members[i];
      const CudaSequence& sequence = *one.sequence;
      const int64_t row = sequence.next_row();
      table.window_rows[i] = static_cast<int32_t>(row + one.n);
      table.steps[i] = static_cast<int32_t>(sequence.end() - sequence.context_tokens());
      for (int64_t t = 0; t < one.n; ++t) {
        table.ids[one.first + t] = one.slice->tokens[static_cast<size_t>(t)];
        table.rows[one.first + t] = {sequence.end() + t, row + t, sequence.window().kv(Layer(0)),
                                     sequence.window().layer_stride()};
      }
    }
  }

  // Null: there are none.
  absl::StatusOr<const StepGraphs*> GraphsOf(Members members) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<std::pair<int64_t, int64_t>> these;
    for (const Member& one : members) {
      if (!one.sequence->is_token(one.n) || !one.slice->wants_next) return nullptr;
      these.emplace_back(one.sequence->id(), one.phase);
    }
    if (members.size() == 1) {
      return &members[0].sequence->graphs()[static_cast<size_t>(these[0].second)];
    }
    if (these != members_) {
      members_ = std::move(these);
      repeated_ = 0;
      graphs_ = StepGraphs();
      return nullptr;
    }
    if (++repeated_ < kRepeatedForGraph || AsksHost(members)) return nullptr;
    if (repeated_ == kRepeatedForGraph) {
      ASSIGN_OR_RETURN(graphs_, CaptureStep(members));
    }
    return &graphs_;
  }

  absl::StatusOr<StepGraphs> CaptureStep(Members members) const {
    StepGraphs graphs;
    const auto capture = [&](absl::FunctionRef<absl::Status()> enqueue) -> absl::Status {
      ASSIGN_OR_RETURN(cuda::Graph graph, cuda::Graph::Capture(main(), enqueue));
      graphs.push_back(std::move(graph));
      return absl::OkStatus();
    };
    if (AsksHost(members)) {
      RETURN_IF_ERROR(EachPart(members, kUnanswered, capture));
    } else {
      RETURN_IF_ERROR(capture([&] { return Enqueue(members, nullptr); }));
    }
    return graphs;
  }

  absl::Status Enqueue(Members members, const StepGraphs* graphs) const {
    const bool asks = AsksHost(members);
    if (graphs != nullptr && !asks) return graphs->front().Launch(main());
    size_t next = 0;
    return EachPart(members, asks, [&](absl::FunctionRef<absl::Status()> enqueue) {
      return graphs == nullptr ? enqueue() : (*graphs)[next++].Launch(main());
    });
  }

  // The parts of a step, which enqueue only; answers: this host's are waited for between them.
  static constexpr bool kUnanswered = false;
  absl::Status EachPart(
      Members members, bool answers,
      absl::FunctionRef<absl::Status(absl::FunctionRef<absl::Status()>)> part) const {
    for (Layer layer(0); layer.value() < config_.shape.layers; layer = layer.next()) {
      RETURN_IF_ERROR(part([&] { return Project(layer, members); }));
      if (answers) RETURN_IF_ERROR(queries_ready_.Record(main()));
      RETURN_IF_ERROR(part([&] { return Attend(layer, members); }));
      if (!answers) continue;
      RETURN_IF_ERROR(queries_ready_.Synchronize());
      Answer(layer, members);
      if (std::none_of(members.begin(), members.end(),
                       [](const Member& one) { return one.status().ok(); })) {
        return absl::OkStatus();
      }
    }
    return part([&] { return End(members); });
  }

  absl::Status Begin(Members members) const {
    const int64_t tokens = TokensOf(members);
    const size_t bytes =
        offsetof(Table, rows) + static_cast<size_t>(tokens) * sizeof(kernels::RopeCudaRow);
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(memory_.table, host_table_.data(), bytes,
                                         cudaMemcpyHostToDevice, main().get()));
    // Where there is no zone nobody writes there.
    RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(memory_.zone.lse, memory_.no_lse,
                        static_cast<size_t>(tokens * config_.shape.q_heads) * sizeof(float),
                        cudaMemcpyDeviceToDevice, main().get()));
    return backend_->Embed(memory_.table->ids, tokens, memory_.hidden);
  }

  absl::Status Project(Layer layer, Members members) const {
    RETURN_IF_ERROR(layer.value() == 0 ? Begin(members)
                                       : FinishLayer(Layer(layer.value() - 1), members));
    const model::CudaPlacement placement = {.rows = memory_.table->rows};
    RETURN_IF_ERROR(backend_->ProjectQkv(layer, memory_.hidden, TokensOf(members), placement,
                                         memory_.q, memory_.q_exact));
    for (size_t i = 0; i < members.size(); ++i) {
      const Member& one = members[i];
      RETURN_IF_ERROR(one.sequence->zone().TakeQueries(layer, Queries(one), main()));
      if (one.sequence->predicts(layer.next(), one.n)) {
        RETURN_IF_ERROR(Predict(layer.next(), one, i));
      }
    }
    return absl::OkStatus();
  }

  // What enters a layer, seen through the next layer's query projection, is close to that layer's true
  // query; closer, with what it lacked for other tokens.
  absl::Status Predict(Layer next, const Member& member, size_t i) const {
    const model::CudaPlacement placement = {.first_position = member.sequence->context_tokens(),
                                            .step = memory_.table->steps + i};
    const CudaSequence::Predicted to = member.sequence->predicted(next);
    RETURN_IF_ERROR(
        backend_->ProjectQuery(next, memory_.hidden + member.first * config_.hidden_size, member.n,
                               placement, member.sequence->drift(next), to.rounded, to.exact));
    return member.sequence->zone().Predict(next, {to.exact, to.rounded, member.n}, main());
  }

  absl::Status Attend(Layer layer, Members members) const {
    const size_t n = members.size();
    // Here, where a store at work leaves time for it.
    for (size_t i = 0; i < n; ++i) {
      const CudaSequence& sequence = *members[i].sequence;
      if (!sequence.predicts(layer, members[i].n)) continue;
      RETURN_IF_ERROR(sequence.LearnDrift(layer, Queries(members[i]).exact, members[i].n,
                                          memory_.table->steps + i, backend_->inv_freq(), main()));
    }
    const size_t shares = SharesOf(members, kStreams);
    RETURN_IF_ERROR(Fork(shares));
    std::vector<std::vector<kernels::WindowAttentionCudaParams>> windows(shares);
    std::vector<CudaZoneWork> work(shares);
    for (size_t i = 0; i < n; ++i) {
      const Member& one = members[i];
      const size_t share = i * shares / n;
      const CudaQueries queries = Queries(one);
      if (one.n == 1) {
        windows[share].push_back(one.sequence->ToWindow(
            layer, queries.rounded, memory_.table->window_rows + i, Of(memory_.window, one)));
      } else {
        // The block's own rows lie behind the window's.
        const int64_t row = one.sequence->next_row();
        RETURN_IF_ERROR(AttendBlock(config_.shape, queries, one.sequence->window().kv(layer), row,
                                    row + one.n, Of(memory_.window, one), StreamOf(share)));
      }
      CudaZoneAttention& zone = one.sequence->zone();
      const CudaPartial to = Of(memory_.zone, one);
      if (zone.asks_host()) continue;
      if (one.sequence->is_token(one.n)) {
        zone.Add(layer, queries.rounded, one.phase, one.sequence->predicts(layer, one.n), to,
                 work[share]);
      } else {
        RETURN_IF_ERROR(zone.Attend(layer, queries, one.phase, to, StreamOf(share)));
      }
    }
    for (size_t share = 0; share < work.size(); ++share) {
      RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(windows[share], StreamOf(share).get()));
      RETURN_IF_ERROR(work[share].Launch(StreamOf(share)));
    }
    RETURN_IF_ERROR(Join(shares));
    for (const Member& one : members) {
      const float* const lse = Of(memory_.window, one).lse;
      RETURN_IF_ERROR(one.sequence->zone().TakeWindow(layer, lse, one.n, main()));
    }
    return absl::OkStatus();
  }

  // Shares of the sequences are attended to side by side.
  absl::Status Fork(size_t shares) const {
    if (shares == 1) return absl::OkStatus();
    RETURN_IF_ERROR(projected_.Record(main()));
    for (size_t i = 0; i + 1 < shares && i < streams_.size(); ++i) {
      RETURN_IF_ERROR(streams_[i].WaitFor(projected_));
    }
    return absl::OkStatus();
  }

  absl::Status Join(size_t shares) const {
    for (size_t i = 0; i + 1 < shares && i < streams_.size(); ++i) {
      RETURN_IF_ERROR(attended_[i].Record(streams_[i]));
      RETURN_IF_ERROR(main().WaitFor(attended_[i]));
    }
    return absl::OkStatus();
  }

  // All questions are on their way before the first answer is waited for.
  void Answer(Layer layer, Members members) const {
    for (const Member& one : members) {
      if (one.status().ok()) one.status() = one.sequence->zone().Ask(layer, one.n);
    }
    for (const Member& one : members) {
      if (one.status().ok()) one.status() = one.sequence->zone().Answer(layer, one.n, main());
    }
  }

  absl::Status FinishLayer(Layer layer, Members members) const {
    for (const Member& one : members) {
      CudaZoneAttention& zone = one.sequence->zone();
      if (!zone.asks_host() || !one.status().ok()) continue;
      RETURN_IF_ERROR(zone.Attend(layer, Queries(one), one.phase, Of(memory_.zone, one), main()));
    }
    kernels::MergeStatesCudaParams merge;
    merge.out_a = memory_.window.out;
    merge.lse_a = memory_.window.lse;
    merge.out_b = memory_.zone.out;
    merge.lse_b = memory_.zone.lse;
    merge.out_bf16 = memory_.attended;
    merge.heads = TokensOf(members) * config_.shape.q_heads;
    merge.head_dim = config_.shape.head_dim;
    RETURN_IF_CUDA_ERROR(kernels::MergeStatesCuda(merge, main().get()));
    return backend_->FinishLayer(layer, memory_.attended, TokensOf(members), memory_.hidden);
  }

  absl::Status End(Members members) const {
    const auto n = static_cast<int64_t>(members.size());
    const int64_t width = config_.hidden_size;
    RETURN_IF_ERROR(FinishLayer(Layer(config_.shape.layers - 1), members));
    for (const Member& one : members) {
      RETURN_IF_ERROR(one.sequence->zone().CopyCounters(main()));
    }
    if (std::none_of(members.begin(), members.end(),
                     [](const Member& one) { return one.slice->wants_next; })) {
      return absl::OkStatus();
    }
    const float* last = memory_.hidden;  // of each member, its last token's
    for (int64_t i = 0; TokensOf(members) > n && i < n; ++i) {
      const Member& one = members[static_cast<size_t>(i)];
      RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(
          memory_.last + i * width, memory_.hidden + (one.first + one.n - 1) * width,
          static_cast<size_t>(width) * sizeof(float), cudaMemcpyDeviceToDevice, main().get()));
      last = memory_.last;
    }
    RETURN_IF_ERROR(backend_->Logits(last, n, memory_.logits));
    RETURN_IF_CUDA_ERROR(
        kernels::ArgmaxCuda(memory_.logits, n, config_.vocab_size, memory_.best, main().get()));
    RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host_best_.data(), memory_.best,
                                         static_cast<size_t>(n) * sizeof(int32_t),
                                         cudaMemcpyDeviceToHost, main().get()));
    return absl::OkStatus();
  }

  const model::Checkpoint checkpoint_;  // the sequences' own may go before
  const model::ModelConfig& config_;
  cuda::DeviceArena plan_, arena_;
  Memory memory_;
  const int64_t own_bytes_;  // beside the weights

  absl::Mutex mu_;
  std::unique_ptr<model::CudaBackend> backend_;  // null: nothing is held
  model::GpuReservation reserved_;
  std::vector<cuda::Stream> streams_;
  cuda::Event projected_, queries_ready_;
  std::vector<cuda::Event> attended_;  // [streams_]
  cuda::PinnedBuffer<Table> host_table_;
  cuda::PinnedBuffer<int32_t> host_best_;
  cuda::PinnedBuffer<float> host_logits_;
  // Of the last step of several: who took part in which phase, how often so since, and its graphs.
  std::vector<std::pair<int64_t, int64_t>> members_ ABSL_GUARDED_BY(mu_);
  int64_t repeated_ ABSL_GUARDED_BY(mu_) = 0;
  StepGraphs graphs_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaSequence(const model::Checkpoint& checkpoint,
                                                           const OpenedContext& context) {
  if (context.config.rope == Rope::kInfiniteHip) {
    return OpenCudaRepositioned(checkpoint, context);
  }
  const model::ModelConfig& config = checkpoint.config;
  RETURN_IF_ERROR(model::CudaBackend::Check(config));
  const AttentionShape& heads = config.shape;
  if ((heads.head_dim != 64 && heads.head_dim != 128) || heads.group() > kernels::kMaxDecodeGroup) {
    return absl::UnimplementedError(absl::StrFormat(
        "device cuda: decoding needs head_dim 64 or 128 and at most %d q heads per KV head; the "
        "model has head_dim=%d and %d",
        kernels::kMaxDecodeGroup, heads.head_dim, heads.group()));
  }
  const auto make = [&]() -> absl::StatusOr<std::shared_ptr<CudaRunner>> {
    return std::make_shared<CudaRunner>(checkpoint);
  };
  ASSIGN_OR_RETURN(std::shared_ptr<CudaRunner> runner,
                   Shared<CudaRunner>::Of(RunnerKey(checkpoint), make));
  auto sequence = std::make_unique<CudaSequence>(context, runner, runner->WeightBytes());
  RETURN_IF_ERROR(sequence->Plan(runner->Bytes(), runner->MissingBytes()));
  RETURN_IF_ERROR(runner->Hold(context.pool));
  // One of its own: others take steps meanwhile.
  ASSIGN_OR_RETURN(const cuda::Stream stream, cuda::Stream::Create());
  RETURN_IF_ERROR(sequence->Load(stream));
  RETURN_IF_ERROR(runner->Capture(*sequence));
  // The token that was run to capture it counts for nothing.
  RETURN_IF_ERROR(sequence->zone().Reset(stream));
  return sequence;
}

}  // namespace carrel::decoder
