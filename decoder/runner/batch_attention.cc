#include "decoder/runner/batch_attention.h"

#include <algorithm>

#include "common/status.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

// Tokens whose queries stay in the L1 cache beside the rows that they look at together.
constexpr int64_t kTokensOfUnit = 8;

bool AsksWith(const CpuSequence& first, const CpuSequence& one) {
  return !one.batch_key().empty() && one.batch_key() == first.batch_key();
}

}  // namespace

BatchAttention::BatchAttention(const AttentionShape& shape, ThreadPool* pool)
    : shape_(shape), pool_(pool) {}

void BatchAttention::Begin(absl::Span<const Member> members) {
  members_.assign(members.begin(), members.end());
  count_ = 0;
  for (size_t i = 0; i < members_.size(); ++i) {
    const int64_t tokens = members_[i].tokens();
    Group* last = count_ == 0 ? nullptr : &groups_[count_ - 1];
    if (last == nullptr || !AsksWith(FirstOf(*last), *members_[i].sequence) ||
        last->tokens + tokens > FirstOf(*last).most_asked()) {
      if (count_ == groups_.size()) groups_.emplace_back();
      last = &groups_[count_++];
      last->first = i;
      last->count = 0;
      last->tokens = 0;
    }
    ++last->count;
    last->tokens += tokens;
  }
}

bool BatchAttention::GoesOn(const Group& group) const {
  return std::any_of(&members_[group.first], &members_[group.first] + group.count,
                     [](const Member& one) { return one.status().ok(); });
}

bool BatchAttention::goes_on() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& one) { return one.status().ok(); });
}

absl::Status BatchAttention::Attend(absl::Span<const model::AttentionInput> inputs,
                                    float* attended) {
  for (const Member& one : members_) {
    if (one.status().ok()) one.status() = one.sequence->CheckWanted();
  }
  std::vector<Group*> going;
  float* to = attended;
  for (size_t g = 0; g < count_; ++g) {
    Group& group = groups_[g];
    group.inputs = inputs.subspan(group.first, group.count);
    group.attended = to;
    to += group.tokens * width();
    if (GoesOn(group)) going.push_back(&group);
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

// On its way while the window is computed.
void BatchAttention::Start(Group& group) {
  const model::AttentionInput& input = group.inputs[0];
  CpuSequence& first = FirstOf(group);
  group.answered = absl::OkStatus();
  if (first.repositioned() != nullptr || first.WindowOf(input.layer) > 0) return;
  if (group.count > 1) group.before = first.zone().statistics_of(input.layer);
  group.answered = first.zone().Start(input.layer, input.q, group.tokens);
}

void BatchAttention::Finish(Group& group) {
  if (group.count == 1) {
    members_[group.first].status() = AttendGroup(group);
    return;
  }
  if (!AttendGroup(group).ok()) AskApart(group);
}

absl::Status BatchAttention::AttendGroup(Group& group) {
  const model::AttentionInput& input = group.inputs[0];
  const Layer layer = input.layer;
  CpuSequence& first = FirstOf(group);
  if (first.repositioned() != nullptr) return first.repositioned()->Attend(input, group.attended);
  const int64_t window = first.WindowOf(layer);
  std::vector<Token> tokens;
  for (size_t i = 0; i < group.count; ++i) {
    const model::AttentionInput& of = group.inputs[i];
    CpuSequence* const sequence = members_[group.first + i].sequence;
    sequence->window().Append(layer, of.k, of.v, of.n);
    for (int64_t at = 0; at < of.n; ++at) tokens.push_back({sequence, &of, at});
  }
  group.window.Reset(group.tokens, shape_);
  // In a layer with a window each has rows of its own.
  const int64_t together = window > 0 ? 1 : kTokensOfUnit;
  const int64_t units = (group.tokens + together - 1) / together * shape_.kv_heads;
  const int64_t asks = window > 0 || !group.answered.ok() ? 0 : 1;
  // Side by side: KV heads are few, and whoever has no head of the zone to look at has the window's. A
  // thread that is alone takes the zone last: its answer is on its way.
  const int64_t zone_unit = pool_->threads() > 0 ? asks - 1 : units + asks - 1;
  pool_->ParallelFor(units + asks, [&](int64_t i) {
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
  if (group.count > 1) {
    ShareCounted(group);
  } else {  // what is measured has no batch_key
    RETURN_IF_ERROR(first.zone().Measure(layer, input.q, input.n, group.zone, group.window));
  }
  Merge(group, 0, group.count, 0);
  return absl::OkStatus();
}

void BatchAttention::ShareCounted(const Group& group) const {
  const Layer layer = group.inputs[0].layer;
  std::vector<CountShare> shares;
  for (size_t i = 0; i < group.count; ++i) {
    CpuSequence* const sequence = members_[group.first + i].sequence;
    shares.push_back({&sequence->zone().statistics_of(layer), group.inputs[i].n});
  }
  ShareCounts(group.before, shares);
}

void BatchAttention::Merge(Group& group, size_t first, size_t count, int64_t at) const {
  float* const out = &group.window.out[static_cast<size_t>(at * width())];
  float* lse = &group.window.lse[static_cast<size_t>(at * shape_.q_heads)];
  int64_t tokens = 0;
  for (const model::AttentionInput& input : group.inputs.subspan(first, count)) tokens += input.n;
  kernels::MergeStates(out, lse, group.zone.out.data(), group.zone.lse.data(),
                       tokens * shape_.q_heads, shape_.head_dim);
  std::copy_n(out, tokens * width(), group.attended + at * width());
  for (size_t i = first; i < first + count; ++i) {
    const model::AttentionInput& input = group.inputs[i];
    QueryTrace* const trace = members_[group.first + i].sequence->trace();
    if (trace != nullptr) trace->Add(input.layer, input.q, lse, input.n);
    lse += input.n * shape_.q_heads;
  }
}

void BatchAttention::AskApart(Group& group) {
  const Layer layer = group.inputs[0].layer;
  FirstOf(group).zone().Cancel();
  FirstOf(group).zone().statistics_of(layer) = group.before;
  int64_t at = 0;
  for (size_t i = 0; i < group.count; ++i) {
    const model::AttentionInput& input = group.inputs[i];
    const Member& one = members_[group.first + i];
    if (one.status().ok()) {
      one.status() = one.sequence->zone().Start(layer, input.q, input.n);
      if (one.status().ok()) {
        one.status() = one.sequence->zone().Finish(layer, input.q, input.n, group.zone);
      }
      if (one.status().ok()) Merge(group, i, 1, at);
    }
    at += input.n;
  }
}

void BatchAttention::AttendWindow(Group& group, absl::Span<const Token> tokens, int64_t together,
                                  int64_t unit) const {
  const KvHead head(static_cast<int32_t>(unit % shape_.kv_heads));
  const int64_t first = unit / shape_.kv_heads * together;
  tokens = tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(together));
  for (size_t i = 0; i < tokens.size(); ++i) {
    AttendNewRows(group, tokens[i], first + static_cast<int64_t>(i), head);
  }
  AttendContextRows(group, tokens, first, head);
}

void BatchAttention::AttendNewRows(Group& group, const Token& one, int64_t index,
                                   KvHead head) const {
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
void BatchAttention::AttendContextRows(Group& group, absl::Span<const Token> tokens, int64_t first,
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
    group.window.Merge(shape_, first + i, head, out.data() + i * count * d, lse.data() + i * count);
  }
}

}  // namespace carrel::decoder
