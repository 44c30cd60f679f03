#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"
#include "decoder/runner/batch_attention.h"
#include "decoder/runner/cpu_sequence.h"
#include "decoder/runner/runner.h"
#include "decoder/runner/runner_key.h"
#include "decoder/sampler.h"
#include "decoder/shared.h"

namespace carrel::decoder {
namespace {

using Member = BatchAttention::Member;

// Tokens of a step beyond which more are not faster, and only keep the others waiting.
constexpr int64_t kMostTokens = 256;

class CpuRunner final : public Runner {
 public:
  CpuRunner(const model::Checkpoint& checkpoint, model::RopeStage rope, ThreadPool* pool)
      : checkpoint_(checkpoint), config_(checkpoint_.config), rope_(rope), pool_(pool) {}

  std::vector<SliceResult> Step(absl::Span<const Slice> batch) override;

 private:
  // Of a step, and of the next one after it.
  struct Activations {
    Activations(std::unique_ptr<model::Backend> made, ThreadPool* pool)
        : backend(std::move(made)),
          transformer(backend.get()),
          attention(backend->config().shape, pool) {}
    const std::unique_ptr<model::Backend> backend;
    model::Transformer transformer;
    BatchAttention attention;
    std::vector<float> hidden, predicted_q, last, logits;
  };

  std::unique_ptr<Activations> Take();
  // So few tokens that each has the bits that it has alone.
  void StepPart(absl::Span<const Slice> batch, absl::Span<const size_t> part,
                std::vector<SliceResult>& results, Activations& activations) const;
  absl::Status RunLayers(absl::Span<const Member> members, Activations& activations) const;
  void Predict(Layer layer, absl::Span<const Member> members, Activations& activations) const;
  absl::Status Logits(absl::Span<const Member> members, Activations& activations) const;

  const model::Checkpoint checkpoint_;  // the sequences' own may go before
  const model::ModelConfig& config_;
  const model::RopeStage rope_;
  ThreadPool* const pool_;
  absl::Mutex mu_;
  // As many as there ever were steps at once.
  std::vector<std::unique_ptr<Activations>> free_ ABSL_GUARDED_BY(mu_);
};

std::unique_ptr<CpuRunner::Activations> CpuRunner::Take() {
  {
    absl::MutexLock lock(&mu_);
    if (!free_.empty()) {
      std::unique_ptr<Activations> activations = std::move(free_.back());
      free_.pop_back();
      return activations;
    }
  }
  return std::make_unique<Activations>(
      model::MakeCpuBackend(config_, checkpoint_.weights, pool_, rope_, checkpoint_.adapter),
      pool_);
}

std::vector<SliceResult> CpuRunner::Step(absl::Span<const Slice> batch) {
  std::unique_ptr<Activations> activations = Take();
  const absl::Cleanup give_back = [&] {
    absl::MutexLock lock(&mu_);
    free_.push_back(std::move(activations));
  };
  const int64_t most = std::min(activations->backend->tokens_alike(), kMostTokens);
  std::vector<SliceResult> results(batch.size());
  std::vector<size_t> order(batch.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Those that may ask as one stand side by side.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return batch[a].sequence->on_cpu()->batch_key() < batch[b].sequence->on_cpu()->batch_key();
  });
  for (const std::vector<size_t>& part : PartsOf(batch, order, most)) {
    StepPart(batch, part, results, *activations);
  }
  return results;
}

void CpuRunner::StepPart(absl::Span<const Slice> batch, absl::Span<const size_t> part,
                         std::vector<SliceResult>& results, Activations& activations) const {
  std::vector<Member> members;
  for (const size_t i : part) {
    CpuSequence* const sequence = batch[i].sequence->on_cpu();
    CARREL_CHECK(sequence != nullptr && !batch[i].tokens.empty());
    sequence->Begin(batch[i]);
    members.push_back({sequence, &batch[i], &results[i]});
  }
  absl::Status status = RunLayers(members, activations);
  if (status.ok()) status = Logits(members, activations);
  for (const Member& one : members) {
    if (!status.ok()) one.status() = status;
    if (one.status().ok()) one.sequence->Took(one.slice->tokens);
  }
}

absl::Status CpuRunner::RunLayers(absl::Span<const Member> members,
                                  Activations& activations) const {
  std::vector<TokenId> ids;
  std::vector<model::TokenBlock> blocks;
  for (const Member& one : members) {
    ids.insert(ids.end(), one.slice->tokens.begin(), one.slice->tokens.end());
    blocks.push_back({one.sequence->end(), one.tokens()});
  }
  activations.attention.Begin(members);
  activations.hidden.resize(ids.size() * static_cast<size_t>(config_.hidden_size));
  float* const hidden = activations.hidden.data();
  RETURN_IF_ERROR(activations.backend->Embed(ids, hidden));
  for (Layer layer(0); layer.value() < config_.shape.layers; layer = layer.next()) {
    Predict(layer, members, activations);
    RETURN_IF_ERROR(
        activations.transformer.ForwardLayer(layer, blocks, hidden, activations.attention));
    if (!activations.attention.goes_on()) break;
  }
  return absl::OkStatus();
}

// What enters this layer, seen through the next layer's query projection, is close to that layer's true
// query; closer, with what it lacked for other tokens.
void CpuRunner::Predict(Layer layer, absl::Span<const Member> members,
                        Activations& activations) const {
  const Layer next = layer.next();
  const float* hidden = activations.hidden.data();
  for (const Member& one : members) {
    const int64_t n = one.tokens();
    if (one.status().ok() && one.sequence->predicts(next)) {
      activations.predicted_q.resize(static_cast<size_t>(n) * config_.shape.q_heads *
                                     config_.shape.head_dim);
      float* const q = activations.predicted_q.data();
      one.status() = activations.backend->ProjectQuery(next, hidden, n, one.sequence->end(), q);
      if (one.status().ok()) one.status() = one.sequence->Predict(next, n, q);
    }
    hidden += n * config_.hidden_size;
  }
}

absl::Status CpuRunner::Logits(absl::Span<const Member> members, Activations& activations) const {
  const int64_t width = config_.hidden_size, vocab = config_.vocab_size;
  std::vector<size_t> wanting;
  activations.last.clear();
  const float* hidden = activations.hidden.data();
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& one = members[i];
    const float* const begin = hidden;
    hidden += one.tokens() * width;
    if (!one.status().ok()) continue;
    if (one.slice->all_logits != nullptr) {
      RETURN_IF_ERROR(activations.backend->Logits(begin, one.tokens(), one.slice->all_logits));
    }
    if (!one.slice->wants_next) continue;
    wanting.push_back(i);
    activations.last.insert(activations.last.end(), hidden - width, hidden);
  }
  const auto count = static_cast<int64_t>(wanting.size());
  if (count == 0) return absl::OkStatus();
  std::vector<float>& logits = activations.logits;  // megabytes, which are not to be mapped anew
  logits.resize(std::max(logits.size(), static_cast<size_t>(count * vocab)));
  RETURN_IF_ERROR(activations.backend->Logits(activations.last.data(), count, logits.data()));
  pool_->ParallelFor(count, [&](int64_t k) {
    const size_t i = wanting[static_cast<size_t>(k)];
    const float* const of = logits.data() + k * vocab;
    if (members[i].slice->next_logits != nullptr) {
      std::copy_n(of, vocab, members[i].slice->next_logits);
    } else {
      members[i].result->next = GreedyToken({of, static_cast<size_t>(vocab)}, pool_);
    }
  });
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Sequence>> OpenCpuSequence(const model::Checkpoint& checkpoint,
                                                          const OpenedContext& context) {
  const model::RopeStage rope = context.config.rope == Rope::kTrained ? model::RopeStage::kApplied
                                                                      : model::RopeStage::kLeftOut;
  const auto make = [&]() -> absl::StatusOr<std::shared_ptr<CpuRunner>> {
    return std::make_shared<CpuRunner>(checkpoint, rope, context.pool);
  };
  const std::string key =
      absl::StrFormat("%p %d %s", context.pool, static_cast<int>(rope), RunnerKey(checkpoint));
  ASSIGN_OR_RETURN(std::shared_ptr<CpuRunner> runner, Shared<CpuRunner>::Of(key, make));
  return CpuSequence::Open(checkpoint.config, context, std::move(runner));
}

}  // namespace carrel::decoder
