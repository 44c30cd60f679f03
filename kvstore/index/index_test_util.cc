#include "kvstore/index/index_test_util.h"

#include <algorithm>
#include <cmath>

#include "common/dtype.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

void Rotate(std::vector<float>& x, Position position) {
  const size_t half = x.size() / 2;
  for (size_t c = 0; c < half; ++c) {
    const double angle = static_cast<double>(position) *
                         std::pow(10000.0, -static_cast<double>(c) / static_cast<double>(half));
    const double cos = std::cos(angle), sin = std::sin(angle), a = x[c], b = x[c + half];
    x[c] = static_cast<float>(a * cos - b * sin);
    x[c + half] = static_cast<float>(b * cos + a * sin);
  }
}

class MemorySegment : public PinnedSegment {
 public:
  MemorySegment(std::unique_ptr<SegmentView> view, std::string where)
      : view_(std::move(view)), where_(std::move(where)) {}
  absl::string_view payload() const override { return view_->payload(); }
  uint8_t dtype() const override { return view_->dtype(); }
  absl::Status Verify(int64_t begin, int64_t end) const override {
    const absl::Status status = view_->Verify(begin, end);
    return status.ok() ? status : Annotate(status, where_);
  }
  bool fully_verified() const override { return view_->fully_verified(); }

 private:
  const std::unique_ptr<SegmentView> view_;
  const std::string where_;
};

SegmentKey KeyOf(uint32_t segment) { return {ContextId(1), 0, Kind::kKeyRows, KvHead(0), segment}; }

}  // namespace

KeySet MakeKeys(std::mt19937_64& rng, int64_t count, int64_t head_dim) {
  std::normal_distribution<float> normal;
  const auto dim = static_cast<size_t>(head_dim);
  std::vector<float> mean(dim);
  for (float& x : mean) x = normal(rng);
  for (int i = 0; i < 2; ++i) mean[rng() % dim] *= 8;  // outlier channels
  constexpr int64_t kClusters = 24;
  std::vector<std::vector<float>> centres(kClusters, std::vector<float>(dim));
  for (auto& centre : centres) {
    for (size_t c = 0; c < dim; ++c) centre[c] = mean[c] + 1.5f * normal(rng);
  }
  KeySet set{.count = count, .head_dim = head_dim};
  set.keys.resize(static_cast<size_t>(count * head_dim));
  for (Position i = 0; i < count; ++i) {
    std::vector<float> key = centres[rng() % kClusters];
    for (float& x : key) x += 0.7f * normal(rng);
    if (dim % 2 == 0) Rotate(key, i);
    FloatToBf16(key, set.keys.data() + i * head_dim);
  }
  return set;
}

std::vector<float> MakeQueries(std::mt19937_64& rng, const KeySet& keys, int64_t group) {
  std::normal_distribution<float> normal;
  std::vector<float> queries;
  std::vector<float> key(static_cast<size_t>(keys.head_dim));
  for (int64_t h = 0; h < group; ++h) {
    const bool aligned = keys.count > 0 && rng() % 2 == 0;
    if (aligned) {
      const auto row = static_cast<Position>(rng() % static_cast<uint64_t>(keys.count));
      WidenToFloat(DType::kBf16, keys.Row(row), keys.head_dim, key.data());
    }
    for (const float x : key) queries.push_back(2 * normal(rng) + (aligned ? 0.7f * x : 0.0f));
  }
  return queries;
}

MemoryContext::MemoryContext(const KeySet& keys, int64_t segment_tokens) {
  manifest_.set_name("memory");
  manifest_.set_tokens(keys.count);
  manifest_.set_layers(1);
  manifest_.set_kv_heads(1);
  manifest_.set_head_dim(static_cast<uint32_t>(keys.head_dim));
  manifest_.set_kv_dtype("bf16");
  manifest_.set_segment_tokens(segment_tokens);
  for (Position at = 0; at < keys.count; at += segment_tokens) {
    const auto segment = static_cast<uint32_t>(at / segment_tokens);
    const int64_t rows = std::min(segment_tokens, keys.count - at);
    values_[segment] = EncodeSegment(EncodeKey(KeyOf(segment)),
                                     std::string(reinterpret_cast<const char*>(keys.Row(at)),
                                                 static_cast<size_t>(rows * keys.head_dim * 2)),
                                     static_cast<uint8_t>(DType::kBf16));
  }
}

absl::StatusOr<std::shared_ptr<const PinnedSegment>> MemoryContext::Segment(
    int32_t layer, Kind kind, KvHead kv_head, uint32_t segment) const {
  const SegmentKey key{ContextId(1), layer, kind, kv_head, segment};
  const auto at = values_.find(segment);
  if (key != KeyOf(segment) || at == values_.end()) {
    return absl::NotFoundError(DescribeKey(key));
  }
  ASSIGN_OR_RETURN(auto view, SegmentView::Open(EncodeKey(key), at->second));
  return std::make_shared<const MemorySegment>(std::move(view),
                                               absl::StrCat("context memory: ", DescribeKey(key)));
}

absl::StatusOr<uint32_t> MemoryContext::SegmentCount(int32_t layer, Kind kind,
                                                     KvHead kv_head) const {
  uint32_t count = 0;
  while (SegmentKey{ContextId(1), layer, kind, kv_head, count} == KeyOf(count) &&
         values_.count(count) > 0) {
    ++count;
  }
  return count;
}

}  // namespace carrel::kvstore
