#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"
#include "decoder/runner/cpu_sequence.h"
#include "decoder/sampler.h"
#include "decoder/shared.h"
#include "decoder/window/partial.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

// Tokens of a step beyond which more are not faster, and only keep the others waiting.
constexpr int64_t kMostTokens = 256;

// Tokens whose queries stay in the L1 cache beside the rows that they look at together.
constexpr int64_t kTokensOfUnit = 8;

struct Member {
  CpuSequence* sequence = nullptr;
  const Slice* slice = nullptr;
  SliceResult* result = nullptr;

  absl::Status& status() const { return result->status; }
  int64_t tokens() const { return static_cast<int64_t>(slice->tokens.size()); }
};

// Attention of the slices of a step, layer by layer: each token to the rows that its sequence holds and to the zone,
// merged. Slices with one batch_key lie side by side, and ask for the zone in one question; the questions of all are
// on their way at once.
// Math:   out = merge(window attention, zone attention): sink, local and new rows are disjoint from the
//         zone, so with every zone row retrieved this is dense attention up to rounding (the master test,
//         tests/master_test.cc).
// Errors: a slice's own, in its status: what fails, or is not wanted any more, fails alone, and computes
//         zeros from there on. Where a question of several fails each asks alone.
// Ownership: keeps what members point to until the next Begin.
class BatchAttention final : public model::SequencesAttention {
 public:
  BatchAttention(const AttentionShape& shape, ThreadPool* pool) : shape_(shape), pool_(pool) {}

  // A step, whose blocks are these members', those with one key together.
  void Begin(absl::Span<const Member> members) {
    members_.assign(members.begin(), members.end());
    groups_.clear();
    for (size_t i = 0; i < members_.size(); ++i) {
      const int64_t tokens = members_[i].tokens();
      const std::string& key = members_[i].sequence->batch_key();
      if (groups_.empty() || key.empty() || key != FirstOf(groups_.back()).batch_key() ||
          groups_.back().tokens + tokens > FirstOf(groups_.back()).most_asked()) {
        groups_.emplace_back().first = i;
      }
      ++groups_.back().count;
      groups_.back().tokens += tokens;
    }
  }

  absl::Status Attend(absl::Span<const model::AttentionInput> inputs, float* attended) override {
    for (const Member& one : members_) {
      if (one.status().ok()) one.status() = one.sequence->CheckWanted();
    }
    std::vector<Group*> going;
    float* to = attended;
    for (Group& group : groups_) {
      group.inputs = inputs.subspan(group.first, group.count);
      group.attended = to;
      to += group.tokens * width();
      if (GoOn(absl::MakeConstSpan(members_).subspan(group.first, group.count)))
        going.push_back(&group);
    }
    const auto count = static_cast<int64_t>(going.size());
    pool_->ParallelFor(count, [&](int64_t i) { Start(*going[static_cast<size_t>(i)]); });
    // Side by side: a thread that has a question of its own waits for nobody within it, and helps with the
    // last ones.
    pool_->ParallelForOfLoops(count, [&](int64_t i) { Finish(*going[static_cast<size_t>(i)]); });
    for (size_t i = 0; i < members_.size(); ++i) {
      if (members_[i].status().ok()) {
        members_[i].sequence->Attended(inputs[i], attended);
      } else {
        std::fill_n(attended, inputs[i].n * width(), 0.0f);
      }
      attended += inputs[i].n * width();
    }
    return absl::OkStatus();
  }

  // Whether any of them still goes on.
  bool goes_on() const { return GoOn(members_); }

 private:
  // Members that ask as one, and what they computed of the layer at hand.
  struct Group {
    size_t first = 0, count = 0;  // members
    int64_t tokens = 0;
    absl::Span<const model::AttentionInput> inputs;
    float* attended = nullptr;  // [tokens, q_heads, head_dim]
    absl::Status answered;
    LayerStatistics before;  // of the first member, before the question
    Partial window, zone;    // [tokens, q_heads]
  };
  struct Token {
    CpuSequence* sequence = nullptr;
    const model::AttentionInput* input = nullptr;
    int64_t at = 0;  // in the input
  };

  int64_t width() const { return int64_t{shape_.q_heads} * shape_.head_dim; }
  CpuSequence& FirstOf(const Group& group) const { return *members_[group.first].sequence; }
  static bool GoOn(absl::Span<const Member> members) {
    return std::any_of(members.begin(), members.end(),
                       [](const Member& one) { return one.status().ok(); });
  }

  // On its way while the window, which takes in the new rows, is computed.
  void Start(Group& group) {
    Ask(group);
    for (size_t i = 0; i < group.count; ++i) {
      const model::AttentionInput& of = group.inputs[i];
      members_[group.first + i].sequence->window().Append(of.layer, of.k, of.v, of.n);
    }
  }

  void Ask(Group& group) {
    const model::AttentionInput& input = group.inputs[0];
    CpuSequence& first = FirstOf(group);
    group.answered = absl::OkStatus();
    if (first.WindowOf(input.layer) > 0) return;
    if (group.count > 1) group.before = first.zone().statistics_of(input.layer);
    group.answered = first.zone().Start(input.layer, input.q, group.tokens);
  }

  void Finish(Group& group) {
    if (group.count == 1) {
      members_[group.first].status() = AttendGroup(group);
      return;
    }
    if (!AttendGroup(group).ok()) AskApart(group);
  }

  absl::Status AttendGroup(Group& group) {
    const model::AttentionInput& input = group.inputs[0];
    const Layer layer = input.layer;
    CpuSequence& first = FirstOf(group);
    const int64_t window = first.WindowOf(layer);
    std::vector<Token> tokens;
    for (size_t i = 0; i < group.count; ++i) {
      const model::AttentionInput& of = group.inputs[i];
      for (int64_t at = 0; at < of.n; ++at) {
        tokens.push_back({members_[group.first + i].sequence, &of, at});
      }
    }
    group.window.Reset(group.tokens, shape_);
    // In a layer with a window each has rows of its own.
    const int64_t together = window > 0 ? 1 : kTokensOfUnit;
    const int64_t units =
        first.repositioned() ? 0 : (group.tokens + together - 1) / together * shape_.kv_heads;
    const int64_t asks = window > 0 || !group.answered.ok() ? 0 : 1;
    // Side by side: KV heads are few, and whoever has no head of the zone to look at has the window's, and
    // then helps with the zone. A thread that is alone takes the zone last: its answer is on its way.
    const int64_t zone_unit = pool_->threads() > 0 ? asks - 1 : units + asks - 1;
    pool_->ParallelForOfLoops(units + asks, [&](int64_t i) {
      if (asks > 0 && i == zone_unit) {
        group.answered = first.zone().Finish(layer, input.q, group.tokens, group.zone);
      } else {
        AttendWindow(group, tokens, together, asks > 0 && i > zone_unit ? i - 1 : i);
      }
    });
    RETURN_IF_ERROR(group.answered);
    if (window > 0) {
      std::copy(group.window.out.begin(), group.window.out.end(), group.attended);
      return absl::OkStatus();
    }
    if (group.count > 1) {  // what was counted of the first member becomes everybody's
      std::vector<CountShare> shares;
      for (size_t i = 0; i < group.count; ++i) {
        CpuSequence* const sequence = members_[group.first + i].sequence;
        shares.push_back({&sequence->zone().statistics_of(layer), group.inputs[i].n});
      }
      ShareCounts(group.before, shares);
    } else {  // what is measured has no batch_key
      RETURN_IF_ERROR(first.zone().Measure(layer, input.q, input.n, group.zone, group.window));
    }
    Merge(group);
    return absl::OkStatus();
  }

  // In units of one KV head of some tokens, which look at the rows of a context together.
  void AttendWindow(Group& group, absl::Span<const Token> tokens, int64_t together,
                    int64_t unit) const {
    const KvHead head(static_cast<int32_t>(unit % shape_.kv_heads));
    const int64_t first = unit / shape_.kv_heads * together;
    tokens = tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(together));
    for (size_t i = 0; i < tokens.size(); ++i) {
      AttendNewRows(group, tokens[i], first + static_cast<int64_t>(i), head);
    }
    AttendContextRows(group, tokens, first, head);
  }

  // index, first: of the group's tokens.
  void AttendNewRows(Group& group, const Token& one, int64_t index, KvHead head) const {
    thread_local std::vector<float> scratch;
    const model::AttentionInput& input = *one.input;
    const Window& rows = one.sequence->window();
    const int64_t d = shape_.head_dim, count = shape_.group();
    const int64_t q_head = head.value() * count;
    // What comes before the token, and itself.
    const int64_t end = rows.rows(input.layer) - input.n + one.at + 1;
    const int64_t window = one.sequence->WindowOf(input.layer);
    const int64_t begin = window > 0 ? std::max<int64_t>(0, end - window) : 0;
    auto params = kernels::OfHeads<kernels::WindowAttentionParams>(shape_);
    params.q = input.q + (one.at * shape_.q_heads + q_head) * d;
    params.rows = end - begin;
    params.k = rows.k(input.layer, head) + begin * d;
    params.v = rows.v(input.layer, head) + begin * d;
    params.out = &group.window.out[static_cast<size_t>((index * shape_.q_heads + q_head) * d)];
    params.lse = &group.window.lse[static_cast<size_t>(index * shape_.q_heads + q_head)];
    scratch.resize(static_cast<size_t>(count * params.rows));
    kernels::WindowAttention(params, scratch.data());
  }

  // All have the same rows: they are read from memory once.
  void AttendContextRows(Group& group, absl::Span<const Token> tokens, int64_t first,
                         KvHead head) const {
    thread_local std::vector<float> queries, out, lse, scratch;
    const CpuSequence& sequence = *tokens[0].sequence;
    const Window& rows = sequence.window();
    const Layer layer = tokens[0].input->layer;
    const int64_t d = shape_.head_dim, count = shape_.group();
    const int64_t vectors = static_cast<int64_t>(tokens.size()) * count;
    const int64_t end = rows.context_rows(layer) - sequence.given_up();
    int64_t begin = 0;
    if (const int64_t window = sequence.WindowOf(layer); window > 0) {  // one token
      const int64_t new_rows = rows.rows(layer) - tokens[0].input->n + tokens[0].at + 1;
      begin = std::clamp<int64_t>(end + new_rows - window, 0, end);
    }
    queries.clear();
    for (const Token& one : tokens) {
      const float* const q = one.input->q + (one.at * shape_.q_heads + head.value() * count) * d;
      queries.insert(queries.end(), q, q + count * d);
    }
    out.resize(static_cast<size_t>(vectors * d));
    lse.resize(static_cast<size_t>(vectors));
    auto params = kernels::OfHeads<kernels::WindowAttentionParams>(shape_);
    params.q = queries.data();
    params.group = vectors;
    params.rows = end - begin;
    params.k = rows.context_k(layer, head) + begin * d;
    params.v = rows.context_v(layer, head) + begin * d;
    params.bf16 = true;
    params.out = out.data();
    params.lse = lse.data();
    scratch.resize(static_cast<size_t>(vectors * params.rows));
    kernels::WindowAttention(params, scratch.data());
    for (int64_t i = 0; i < static_cast<int64_t>(tokens.size()); ++i) {
      group.window.Merge(shape_, first + i, head, out.data() + i * count * d,
                         lse.data() + i * count);
    }
  }

  // What the zone gave joins the window's.
  void Merge(Group& group) const {
    kernels::MergeStates(group.window.out.data(), group.window.lse.data(), group.zone.out.data(),
                         group.zone.lse.data(), group.tokens * shape_.q_heads, shape_.head_dim);
    std::copy(group.window.out.begin(), group.window.out.end(), group.attended);
    const float* lse = group.window.lse.data();
    for (size_t i = 0; i < group.count; ++i) {
      const model::AttentionInput& input = group.inputs[i];
      QueryTrace* const trace = members_[group.first + i].sequence->trace();
      if (trace != nullptr) trace->Add(input.layer, input.q, lse, input.n);
      lse += input.n * shape_.q_heads;
    }
  }

  // Each asks for itself.
  void AskApart(const Group& group) {
    FirstOf(group).zone().Cancel();
    FirstOf(group).zone().statistics_of(group.inputs[0].layer) = group.before;
    float* to = group.attended;
    for (size_t i = 0; i < group.count; ++i) {
      Group one = {.first = group.first + i, .count = 1, .tokens = group.inputs[i].n};
      one.inputs = group.inputs.subspan(i, 1);
      one.attended = to;
      to += one.tokens * width();
      if (!members_[one.first].status().ok()) continue;
      Ask(one);
      Finish(one);
    }
  }

  const AttentionShape shape_;
  ThreadPool* const pool_;
  std::vector<Member> members_;
  std::vector<Group> groups_;
};

class CpuRunner final : public Runner {
 public:
  CpuRunner(const model::Checkpoint& checkpoint, model::RopeStage rope, ThreadPool* pool)
      : checkpoint_(checkpoint), config_(checkpoint_.config), rope_(rope), pool_(pool) {}

  std::vector<SliceResult> Step(absl::Span<const Slice> batch) override {
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

  std::unique_ptr<Activations> Take() {
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

  // So few tokens that each has the bits that it has alone.
  void StepPart(absl::Span<const Slice> batch, absl::Span<const size_t> part,
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

  absl::Status RunLayers(absl::Span<const Member> members, Activations& activations) const {
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
  void Predict(Layer layer, absl::Span<const Member> members, Activations& activations) const {
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

  absl::Status Logits(absl::Span<const Member> members, Activations& activations) const {
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

  const model::Checkpoint checkpoint_;  // the sequences' own may go before
  const model::ModelConfig& config_;
  const model::RopeStage rope_;
  ThreadPool* const pool_;
  absl::Mutex mu_;
  // As many as there ever were steps at once.
  std::vector<std::unique_ptr<Activations>> free_ ABSL_GUARDED_BY(mu_);
};

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
