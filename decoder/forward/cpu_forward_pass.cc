#include <algorithm>

#include "common/status.h"
#include "decoder/forward/attention_together.h"
#include "decoder/forward/forward_pass.h"
#include "decoder/forward/query_drift.h"
#include "decoder/forward/repositioned_attention.h"
#include "decoder/forward/retrieval_attention.h"
#include "decoder/sampler.h"

namespace carrel::decoder {
namespace {

// Tokens of a step beyond which more together are not faster, and only keep the others waiting.
constexpr int64_t kMostTogether = 256;

// Shows what passes through an attention.
class ObservedAttention : public model::Attention {
 public:
  ObservedAttention(model::Attention& attention, const Observer& observer)
      : attention_(attention), observer_(observer) {}
  absl::Status Attend(const model::AttentionInput& input, float* attended) override {
    RETURN_IF_ERROR(attention_.Attend(input, attended));
    observer_(input, attended);
    return absl::OkStatus();
  }

 private:
  model::Attention& attention_;
  const Observer observer_;
};

class CpuForwardPass final : public ForwardPass {
 public:
  CpuForwardPass(const model::Checkpoint& checkpoint, const RetrievalConfig& config,
                 std::unique_ptr<SequenceAttention> attention, StoredDrift drift, ThreadPool* pool,
                 const Observer* observer)
      : config_(checkpoint.config),
        prefetch_(config.prefetch),
        backend_(model::MakeCpuBackend(
            checkpoint.config, checkpoint.weights, pool,
            config.rope == Rope::kTrained ? model::RopeStage::kApplied : model::RopeStage::kLeftOut,
            checkpoint.adapter)),
        transformer_(backend_.get()),
        attention_(std::move(attention)),
        drift_(config_.shape,
               config.rope == Rope::kTrained
                   ? model::RopeInvFreq(config_.rope, config_.shape.head_dim)
                   : std::vector<float>(),
               std::move(drift)),
        observer_(*observer),
        pool_(pool) {}

  int64_t max_tokens() const override { return INT64_MAX; }

  absl::Status Run(absl::Span<const TokenId> tokens, Position first_position) override {
    const int64_t n = static_cast<int64_t>(tokens.size());
    n_ = n;
    logits_known_ = false;
    hidden_.resize(static_cast<size_t>(n * config_.hidden_size));
    RETURN_IF_ERROR(backend_->Embed(tokens, hidden_.data()));
    ObservedAttention attention(*attention_,
                                [this](const model::AttentionInput& input, const float* attended) {
                                  Observe(input, attended);
                                });
    for (Layer layer(0); layer.value() < config_.shape.layers; layer = layer.next()) {
      if (wanted_ && !wanted_()) return NotWanted();
      const Layer next = layer.next();
      if (prefetch_ != Prefetch::kOff && next.value() < config_.shape.layers) {
        // What enters this layer, seen through the next layer's query projection, is close to that
        // layer's true query; closer, with what it lacked for other tokens.
        predicted_q_.resize(static_cast<size_t>(n) * config_.shape.q_heads *
                            config_.shape.head_dim);
        RETURN_IF_ERROR(
            backend_->ProjectQuery(next, hidden_.data(), n, first_position, predicted_q_.data()));
        drift_.Correct(next, n, first_position, predicted_q_.data());
        RETURN_IF_ERROR(attention_->Prefetch(next, predicted_q_.data(), n));
      }
      RETURN_IF_ERROR(
          transformer_.ForwardLayer(layer, n, first_position, hidden_.data(), attention));
    }
    return absl::OkStatus();
  }

  // What is asked ahead is each sequence's own: such sequences go one by one.
  void RunTogether(absl::Span<PassBlock> blocks) override {
    std::vector<PassBlock*> alike;
    int64_t tokens = 0;
    const auto run = [&] {
      if (!alike.empty()) PassOf(*alike[0]).RunAlike(alike);
      alike.clear();
      tokens = 0;
    };
    const int64_t most = std::min(backend_->tokens_alike(), kMostTogether);
    for (PassBlock& one : blocks) {
      const auto n = static_cast<int64_t>(one.tokens.size());
      if (PassOf(one).prefetch_ != Prefetch::kOff || n > most) {
        one.status = one.pass->Run(one.tokens, one.first_position);
        continue;
      }
      if (tokens + n > most) run();
      alike.push_back(&one);
      tokens += n;
    }
    run();
  }

  absl::Status Logits(int64_t count, float* logits) override {
    CARREL_CHECK(count <= n_);
    if (logits_known_ && count == 1) {
      std::copy(logits_.begin(), logits_.end(), logits);
      return absl::OkStatus();
    }
    return backend_->Logits(&hidden_[(n_ - count) * config_.hidden_size], count, logits);
  }

  absl::StatusOr<TokenId> Greedy() override {
    if (!logits_known_) {
      logits_.resize(static_cast<size_t>(config_.vocab_size));
      RETURN_IF_ERROR(
          backend_->Logits(&hidden_[(n_ - 1) * config_.hidden_size], 1, logits_.data()));
      ChooseGreedily();
    }
    return greedy_;
  }

  void set_reading_prompt(bool reading) override { attention_->set_reading_prompt(reading); }
  void set_wanted(std::function<bool()> wanted) override { wanted_ = std::move(wanted); }
  void StartSequence(int64_t give_up) override {
    attention_->StartSequence(give_up);
    drift_.StartSequence();
  }
  bool KeepSequence(int64_t tokens) override {
    drift_.StartSequence();
    return attention_->KeepSequence(tokens);
  }
  std::vector<float> CopyRows(int64_t tokens) const override {
    return attention_->CopyRows(tokens);
  }
  bool RestoreRows(const std::vector<float>& rows, int64_t tokens) override {
    drift_.StartSequence();
    return attention_->RestoreRows(rows, tokens);
  }
  Statistics statistics() const override { return attention_->statistics(); }
  absl::Status set_trace(QueryTrace* trace) override { return attention_->set_trace(trace); }
  void AttendedHere(const QueryTrace& trace, Layer layer,
                    std::vector<AttendedRow>& rows) const override {
    attention_->AttendedHere(trace, layer, rows);
  }

 private:
  // So few tokens that each has the bits that it has alone.
  void RunAlike(absl::Span<PassBlock* const> blocks) {
    const auto fail = [&](const absl::Status& status) {
      for (PassBlock* one : blocks) one->status = status;
    };
    if (const absl::Status status = RunLayers(blocks); !status.ok()) return fail(status);
    const int64_t width = config_.hidden_size;
    std::vector<CpuForwardPass*> wanting;
    std::vector<float> last;  // of each of them, its last token
    const float* from = together_.data();
    for (const PassBlock* one : blocks) {
      const auto n = static_cast<int64_t>(one->tokens.size());
      PassOf(*one).Take(from, n);
      from += n * width;
      if (!one->wants_logits) continue;
      wanting.push_back(&PassOf(*one));
      last.insert(last.end(), from - width, from);
    }
    const auto count = static_cast<int64_t>(wanting.size());
    // Megabytes, which are not to be mapped anew at each step.
    thread_local std::vector<float> logits;
    logits.resize(std::max(logits.size(), static_cast<size_t>(count * config_.vocab_size)));
    if (const absl::Status status = backend_->Logits(last.data(), count, logits.data());
        !status.ok()) {
      return fail(status);
    }
    const float* const all = logits.data();
    pool_->ParallelFor(count, [&](int64_t i) {
      wanting[static_cast<size_t>(i)]->TakeLogits(all + i * config_.vocab_size);
    });
  }

  void Observe(const model::AttentionInput& input, const float* attended) {
    drift_.Learn(input.layer, input.n, input.first_position, input.q);
    if (observer_) observer_(input, attended);
  }

  static CpuForwardPass& PassOf(const PassBlock& one) {
    return *static_cast<CpuForwardPass*>(one.pass);
  }

  // Into together_, what leaves the last layer.
  absl::Status RunLayers(absl::Span<PassBlock* const> blocks) {
    const int64_t width = int64_t{config_.shape.q_heads} * config_.shape.head_dim;
    std::vector<TokenId> ids;
    std::vector<model::TokenBlock> lengths;
    std::vector<AttentionTogether::Member> members;
    for (PassBlock* one : blocks) {
      CpuForwardPass& pass = PassOf(*one);
      const auto n = static_cast<int64_t>(one->tokens.size());
      one->status = absl::OkStatus();
      ids.insert(ids.end(), one->tokens.begin(), one->tokens.end());
      lengths.push_back({one->first_position, n});
      const auto observe = [&pass](const model::AttentionInput& input, const float* attended) {
        pass.Observe(input, attended);
      };
      members.push_back({pass.attention_.get(), n, &pass.wanted_, observe, &one->status});
    }
    AttentionTogether attention(std::move(members), width, pool_);
    together_.resize(ids.size() * static_cast<size_t>(config_.hidden_size));
    RETURN_IF_ERROR(backend_->Embed(ids, together_.data()));
    for (Layer layer(0); layer.value() < config_.shape.layers; layer = layer.next()) {
      RETURN_IF_ERROR(transformer_.ForwardLayer(layer, lengths, together_.data(), attention));
    }
    return absl::OkStatus();
  }

  // As if it had run alone.
  void Take(const float* hidden, int64_t n) {
    n_ = n;
    hidden_.assign(hidden, hidden + n * config_.hidden_size);
    logits_known_ = false;
  }
  void TakeLogits(const float* logits) {
    logits_.assign(logits, logits + config_.vocab_size);
    ChooseGreedily();
  }
  void ChooseGreedily() {
    greedy_ = GreedyToken(logits_, pool_);
    logits_known_ = true;
  }

  const model::ModelConfig& config_;
  const Prefetch prefetch_;
  const std::unique_ptr<model::Backend> backend_;
  model::Transformer transformer_;
  const std::unique_ptr<SequenceAttention> attention_;
  QueryDrift drift_;
  const Observer& observer_;
  ThreadPool* const pool_;
  std::function<bool()> wanted_;
  int64_t n_ = 0;  // tokens of the last Run
  std::vector<float> hidden_, predicted_q_;
  std::vector<float> logits_;                   // of its last token, if logits_known_
  absl::StatusOr<TokenId> greedy_ = TokenId{};  // by them
  bool logits_known_ = false;
  std::vector<float> together_;  // of sequences that go together, where this pass leads them
};

}  // namespace

absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCpuForwardPass(const model::Checkpoint& checkpoint,
                                                                const OpenedContext& context,
                                                                const Observer* observer) {
  std::unique_ptr<SequenceAttention> attention;
  if (context.config.rope == Rope::kInfiniteHip) {
    if (checkpoint.config.sliding.window > 0) {
      return absl::UnimplementedError(
          "rope=infinitehip: not run for models with sliding windows: their layers turn keys by "
          "themselves");
    }
    ASSIGN_OR_RETURN(attention, RepositionedAttention::Create(context, checkpoint.config));
  } else {
    ASSIGN_OR_RETURN(attention, RetrievalAttention::Create(context, checkpoint.config.Windows()));
  }
  return std::make_unique<CpuForwardPass>(checkpoint, context.config, std::move(attention),
                                          context.drift, context.pool, observer);
}

}  // namespace carrel::decoder
