#include "kernels/select/chunk_prune/chunk_prune.h"

#include <algorithm>
#include <utility>

#include "kernels/select/topk/topk.h"

namespace carrel::kernels {
namespace {

// The score of each chunk's representative. All chunks descend in step: one batch of keys a level.
std::vector<float> Representatives(const std::vector<RowRange>& chunks, ScoreProbes score) {
  const auto count = static_cast<int64_t>(chunks.size());
  std::vector<RowRange> left = chunks;
  std::vector<float> best(chunks.size()), scores;
  std::vector<size_t> open;
  std::vector<ChunkProbe> probes;
  const auto run = [&] {
    scores.resize(probes.size());
    score(probes, scores);
  };
  for (size_t i = 0; i < chunks.size(); ++i) {
    open.push_back(i);
    // A chunk of one row is its own representative.
    if (chunks[i].rows() == 1) {
      probes.push_back({chunks[i].begin, count - 1 - static_cast<int64_t>(i), true});
    }
  }
  if (!probes.empty()) {
    run();
    for (size_t i = 0, at = 0; i < chunks.size(); ++i) {
      if (chunks[i].rows() == 1) best[i] = scores[at++];
    }
  }
  while (true) {
    std::erase_if(open, [&](size_t i) { return left[i].rows() == 1; });
    if (open.empty()) return best;
    probes.clear();
    for (const size_t i : open) {
      const Position middle = (left[i].begin + left[i].end) / 2;
      const int64_t back = count - 1 - static_cast<int64_t>(i);
      probes.push_back({(left[i].begin + middle) / 2, back, false});
      probes.push_back({(middle + left[i].end) / 2, back, true});
    }
    run();
    for (size_t j = 0; j < open.size(); ++j) {
      RowRange& range = left[open[j]];
      const Position middle = (range.begin + range.end) / 2;
      const bool right = scores[2 * j + 1] > scores[2 * j];
      best[open[j]] = scores[2 * j + (right ? 1 : 0)];
      range = right ? RowRange{middle, range.end} : RowRange{range.begin, middle};
    }
  }
}

}  // namespace

std::vector<RowRange> KeepBestChunks(const std::vector<RowRange>& candidates, int64_t chunk,
                                     int64_t wanted, ScoreProbes score) {
  int64_t rows = 0;
  for (const RowRange& range : candidates) rows += range.rows();
  if (rows <= wanted) return candidates;
  while (chunk > wanted) chunk /= 2;
  std::vector<RowRange> chunks;
  for (const RowRange& range : candidates) {
    for (Position at = range.begin; at < range.end; at += chunk) {
      chunks.push_back({at, std::min(range.end, at + chunk)});
    }
  }
  std::vector<RowRange> kept;
  for (const int64_t i : BestIndices(Representatives(chunks, score), wanted / chunk)) {
    kept.push_back(chunks[static_cast<size_t>(i)]);
  }
  return kept;
}

std::vector<ScoredBlock> HalveChunks(RowRange zone, int64_t block_rows, int64_t wanted,
                                     ChooseBlock choose, ScoreProbes score) {
  const int64_t blocks = (zone.rows() + block_rows - 1) / block_rows;
  const int64_t chunks = std::min(wanted, blocks);
  std::vector<RowRange> kept, branches;  // of blocks
  for (int64_t i = 0; i < chunks; ++i) {
    kept.push_back({i * blocks / chunks, (i + 1) * blocks / chunks});
  }
  std::vector<float> scores(kept.size(), 0.0f), best, of_keys;
  std::vector<ChunkProbe> probes;
  const auto splits = [](const RowRange& branch) { return branch.rows() > 1; };
  for (int64_t round = 0; std::any_of(kept.begin(), kept.end(), splits); ++round) {
    branches.clear();
    probes.clear();
    std::vector<bool> later;  // of the two halves
    std::vector<size_t> ends;
    for (const RowRange& branch : kept) {
      const int64_t middle = (branch.begin + branch.end) / 2;
      if (splits(branch)) branches.push_back({branch.begin, middle});
      branches.push_back({splits(branch) ? middle : branch.begin, branch.end});
      later.resize(branches.size(), false);
      later.back() = true;
    }
    const auto count = static_cast<int64_t>(branches.size());
    for (int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>(i);
      const RowRange rows = RowsOfBlock(zone, block_rows, choose(branches[at], round, i));
      for (Position row = rows.begin; row < rows.end; ++row) {
        probes.push_back({row, count - 1 - i, later[at]});
      }
      ends.push_back(probes.size());
    }
    of_keys.resize(probes.size());
    score(probes, of_keys);
    scores.clear();
    for (size_t i = 0, begin = 0; i < ends.size(); begin = ends[i++]) {
      scores.push_back(*std::max_element(&of_keys[begin], of_keys.data() + ends[i]));
    }
    kept.clear();
    best.clear();
    for (const int64_t i : BestIndices(scores, wanted)) {
      kept.push_back(branches[static_cast<size_t>(i)]);
      best.push_back(scores[static_cast<size_t>(i)]);
    }
    std::swap(scores, best);
  }
  std::vector<ScoredBlock> out;
  for (size_t i = 0; i < kept.size(); ++i) out.push_back({kept[i].begin, scores[i]});
  return out;
}

}  // namespace carrel::kernels
