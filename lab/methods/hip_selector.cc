#include "lab/methods/hip_selector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "common/status.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "decoder/select/row_selector.h"
#include "kernels/select/chunk_prune/chunk_prune.h"
#include "lab/methods/options.h"

namespace carrel::decoder {
namespace {

struct Vote {
  int64_t votes = 0;
  float score = 0;  // the best that a member gave it
};

// Fixed by what it is drawn for, so that threads do not matter. Uniform in [-1, 1).
double Draw(uint64_t seed, uint64_t head, uint64_t member, uint64_t round, uint64_t branch) {
  uint64_t x = seed;
  for (const uint64_t word : {head, member, round, branch}) {
    x += word + 0x9e3779b97f4a7c15ull;  // splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1p-52 - 1;
}

class HipSelector final : public RowSelector {
 public:
  HipSelector(const HipConfig& config, const AttentionShape& shape, RowRange zone,
              const HostRows& rows)
      : config_(config),
        shape_(shape),
        zone_(zone),
        rows_(rows),
        cached_(static_cast<size_t>(shape.layers) * shape.kv_heads) {}

  int64_t block_tokens() const override { return config_.block_q; }
  void StartSequence() override {
    for (std::vector<Position>& rows : cached_) rows.clear();
  }

  void Select(const SelectRequest& request, SelectedRows& selection) override {
    if (request.budget >= zone_.rows()) return AllRows(zone_, selection.rows);
    std::vector<Position>& cached =
        cached_[static_cast<size_t>(request.layer.value()) * shape_.kv_heads +
                request.head.value()];
    if (request.step > 0 && request.step % config_.refresh != 0 && !cached.empty()) {
      selection.rows = cached;
      return;
    }
    const int64_t unit = std::max(config_.block_k, config_.widen);
    const int64_t wanted = std::max<int64_t>(1, request.budget / unit);
    std::map<int64_t, Vote> votes;
    for (int64_t member = 0; member < config_.ensemble; ++member) {
      Descend(request, wanted, member, votes, selection);
    }
    Gather(request.budget, Elect(votes, wanted), selection.rows);
    if (request.step != kPromptStep) cached = selection.rows;
  }

 private:
  // The block that stands for a branch of blocks.
  int64_t Representative(const SelectRequest& request, RowRange branch, int64_t member,
                         int64_t round, int64_t number) const {
    const int64_t middle = (branch.begin + branch.end) / 2;
    if (member == 0 || branch.rows() == 1) return middle;
    const auto head = static_cast<uint64_t>(request.layer.value()) * shape_.kv_heads +
                      static_cast<uint64_t>(request.head.value());
    const double away =
        config_.jitter * Draw(config_.seed, head, static_cast<uint64_t>(member),
                              static_cast<uint64_t>(round), static_cast<uint64_t>(number));
    const int64_t moved = middle + std::llround(away * static_cast<double>(branch.rows()) / 2);
    return std::clamp(moved, branch.begin, branch.end - 1);
  }

  void Descend(const SelectRequest& request, int64_t wanted, int64_t member,
               std::map<int64_t, Vote>& votes, SelectedRows& selection) const {
    const auto choose = [&](RowRange branch, int64_t round, int64_t number) {
      return Representative(request, branch, member, round, number);
    };
    const auto score = [&](absl::Span<const kernels::ChunkProbe> keys, std::vector<float>& scores) {
      ScoreProbes(request, rows_.At(request.layer, request.head), shape_.head_dim, keys, scores,
                  selection);
    };
    for (const kernels::ScoredBlock& found :
         kernels::HalveChunks(zone_, config_.block_k, wanted, choose, score)) {
      Vote& vote = votes[found.block];
      vote.score = vote.votes == 0 ? found.score : std::max(vote.score, found.score);
      ++vote.votes;
    }
  }

  std::vector<int64_t> Elect(const std::map<int64_t, Vote>& votes, int64_t wanted) const {
    std::vector<std::pair<int64_t, Vote>> elected;
    for (const auto& [block, vote] : votes) {
      if (vote.votes >= config_.votes) elected.emplace_back(block, vote);
    }
    // Every member may have gone another way: then the best-voted block stands alone.
    if (elected.empty()) elected.assign(votes.begin(), votes.end());
    const bool none = elected.front().second.votes < config_.votes;
    std::stable_sort(elected.begin(), elected.end(), [](const auto& a, const auto& b) {
      return a.second.votes != b.second.votes ? a.second.votes > b.second.votes
                                              : a.second.score > b.second.score;
    });
    elected.resize(std::min(elected.size(), static_cast<size_t>(none ? 1 : wanted)));
    std::vector<int64_t> blocks;
    for (const auto& [block, vote] : elected) blocks.push_back(block);
    return blocks;
  }

  void Gather(int64_t budget, const std::vector<int64_t>& blocks,
              std::vector<Position>& rows) const {
    rows.clear();
    for (const int64_t block : blocks) {
      RowRange range = kernels::RowsOfBlock(zone_, config_.block_k, block);
      if (config_.widen > config_.block_k) {
        const int64_t window = (range.begin - zone_.begin) / config_.widen;
        range.begin = zone_.begin + window * config_.widen;
        range.end = std::min(zone_.end, range.begin + config_.widen);
      }
      for (Position row = range.begin; row < range.end; ++row) rows.push_back(row);
    }
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    if (static_cast<int64_t>(rows.size()) > budget) rows.resize(static_cast<size_t>(budget));
  }

  const HipConfig config_;
  const AttentionShape shape_;
  const RowRange zone_;
  const HostRows& rows_;
  std::vector<std::vector<Position>> cached_;  // [layers, kv_heads]
};

class HipMethodType final : public MethodType {
 public:
  absl::string_view name() const override { return "hip"; }
  absl::Status Parse(const MethodSettings& settings, SelectorConfig& config) const override {
    HipConfig hip;
    RETURN_IF_ERROR(settings.Set(
        {{"block_q", MethodSettings::Number(hip.block_q, 1, 1024)},
         {"block_k", MethodSettings::Number(hip.block_k, 1, 1024)},
         {"refresh", MethodSettings::Number(hip.refresh, 1, 1024)},
         {"ensemble", MethodSettings::Number(hip.ensemble, 1, 64)},
         {"votes", MethodSettings::Number(hip.votes, 1, 64)},
         {"jitter",
          [&hip](absl::string_view text) {
            const bool good =
                absl::SimpleAtod(text, &hip.jitter) && hip.jitter >= 0 && hip.jitter <= 1;
            return good ? absl::OkStatus() : MethodSettings::Refused(text, "a number in 0 .. 1");
          }},
         {"widen", MethodSettings::Number(hip.widen, 0, 1024)},
         {"seed", MethodSettings::Number(hip.seed, 0, std::numeric_limits<int64_t>::max())},
         {"mask", MethodSettings::Mask(config.mask)}}));
    if (hip.votes > hip.ensemble)
      return settings.Refuse(absl::StrCat("votes=", hip.votes, " exceeds ensemble=", hip.ensemble));
    config.options = hip;
    return absl::OkStatus();
  }
  std::string Describe(const SelectorConfig& config) const override {
    return config.mask == SelectorMask::kQHead ? ":mask=q-head" : "";
  }
  absl::Status ValidateCuda(const SelectorConfig& config) const override {
    RETURN_IF_ERROR(CheckCudaMask(config));
    const auto hip = OptionsOf<HipConfig>(config);
    if (hip.block_q != 1) return NotOnGpu("block_q", hip.block_q, "1");
    if (hip.ensemble != 1) return NotOnGpu("ensemble", hip.ensemble, "1");
    if (hip.widen != 0) return NotOnGpu("widen", hip.widen, "0");
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig& config,
                                                    const SelectorInput& input) const override {
    return std::make_unique<HipSelector>(OptionsOf<HipConfig>(config), input.shape, input.zone,
                                         input.rows);
  }
};

}  // namespace

const MethodType& HipMethod() {
  static const HipMethodType method;
  return method;
}

}  // namespace carrel::decoder
