#include "decoder/runner/runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace carrel::decoder {

std::vector<std::vector<size_t>> PartsOf(absl::Span<const Slice> batch,
                                         absl::Span<const size_t> order, int64_t most) {
  const auto tokens = [&](size_t i) { return static_cast<int64_t>(batch[i].tokens.size()); };
  std::vector<size_t> shortest_first(order.begin(), order.end());
  std::stable_sort(shortest_first.begin(), shortest_first.end(),
                   [&](size_t a, size_t b) { return tokens(a) < tokens(b); });
  std::vector<std::vector<size_t>> parts;
  int64_t room = 0;  // of the last part
  for (const size_t i : shortest_first) {
    if (parts.empty() || tokens(i) > room) {
      parts.emplace_back();
      room = most;
    }
    parts.back().push_back(i);
    room -= tokens(i);
  }
  return parts;
}

std::string RunnerKey(const model::Checkpoint& checkpoint) {
  std::string key = absl::StrFormat("%p %p", checkpoint.weights.get(), checkpoint.adapter.get());
  for (const auto& [name, value] : checkpoint.config.FingerprintFields()) {
    absl::StrAppend(&key, " ", name, "=", value);
  }
  return key;
}

int64_t Sequence::Sync(absl::Span<const TokenId> prompt, bool resume, int64_t give_up) {
  size_t same = 0;
  if (resume && give_up == given_up_ && !prompt.empty()) {
    const size_t most = std::min(tokens_.size(), prompt.size() - 1);
    while (same < most && prompt[same] == tokens_[same]) ++same;
  }
  if (same == 0 || !Keep(static_cast<int64_t>(same))) {
    same = 0;
    given_up_ = give_up;
    Start(give_up);
  }
  tokens_.resize(same);
  return static_cast<int64_t>(same);
}

SavedSequence Sequence::Save() const {
  SavedSequence saved;
  saved.given_up = given_up_;
  saved.rows = CopyRows(static_cast<int64_t>(tokens_.size()));
  if (!saved.rows.empty()) saved.tokens = tokens_;
  return saved;
}

absl::Status Sequence::Restore(SavedSequence saved) {
  tokens_.clear();
  given_up_ = saved.given_up;
  Start(given_up_);
  if (!RestoreRows(saved.rows, static_cast<int64_t>(saved.tokens.size()))) {
    return absl::DataLossError(absl::StrCat("a sequence of ", saved.tokens.size(), " tokens has ",
                                            saved.rows.size(), " numbers in its rows"));
  }
  tokens_ = std::move(saved.tokens);
  return absl::OkStatus();
}

absl::Status Sequence::CheckWanted() const {
  if (!wanted_ || wanted_()) return absl::OkStatus();
  return absl::CancelledError("nobody wants the answer any more");
}

absl::Status Sequence::set_trace(QueryTrace* trace) {
  if (trace == nullptr) return absl::OkStatus();
  return absl::UnimplementedError(
      "sources: told by a decoder on the CPU whose positions are the model's own");
}

}  // namespace carrel::decoder
