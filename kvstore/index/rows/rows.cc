#include "kvstore/index/rows/rows.h"

#include <bit>
#include <utility>

#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kMaxHeadDim = 65536;
constexpr int64_t kMaxTokens = int64_t{1} << 31;  // indexes count rows in 32 bits

absl::Status CheckManifest(const v1::Manifest& manifest, Layer layer, KvHead kv_head) {
  const std::string& name = manifest.name();
  if (layer.value() < 0 || layer.value() >= static_cast<int64_t>(manifest.layers())) {
    return absl::InvalidArgumentError(absl::StrCat("context ", name, ": layer ", layer.value(),
                                                   ", must be below ", manifest.layers()));
  }
  if (kv_head.value() < 0 || kv_head.value() >= static_cast<int64_t>(manifest.kv_heads())) {
    return absl::InvalidArgumentError(absl::StrCat("context ", name, ": kv_head ", kv_head.value(),
                                                   ", must be below ", manifest.kv_heads()));
  }
  if (manifest.kv_dtype() != "bf16") {
    return absl::FailedPreconditionError(absl::StrCat(
        "context ", name, ": rows are ", manifest.kv_dtype(), ", this program reads bf16"));
  }
  if (manifest.head_dim() < 1 || manifest.head_dim() > kMaxHeadDim || manifest.tokens() < 0 ||
      manifest.tokens() > kMaxTokens || manifest.segment_tokens() < 1) {
    return absl::DataLossError(
        absl::StrCat("context ", name, ": manifest has head_dim=", manifest.head_dim(),
                     " tokens=", manifest.tokens(), " segment_tokens=", manifest.segment_tokens()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Rows> Rows::Open(const StoredContext& context, Layer layer, Kind kind,
                                KvHead kv_head) {
  const v1::Manifest& manifest = context.manifest();
  RETURN_IF_ERROR(CheckManifest(manifest, layer, kv_head));
  Rows rows;
  rows.count_ = manifest.tokens();
  rows.head_dim_ = manifest.head_dim();
  rows.row_bytes_ = rows.head_dim_ * 2;
  rows.SetSegmentTokens(manifest.segment_tokens());
  const int64_t segments = (rows.count_ + rows.segment_tokens_ - 1) / rows.segment_tokens_;
  ASSIGN_OR_RETURN(const uint32_t stored, context.SegmentCount(layer.value(), kind, kv_head));
  const auto where = [&](int64_t segment) {
    return absl::StrCat(
        "context ", manifest.name(), ": ",
        DescribeKey({ContextId(), layer.value(), kind, kv_head, static_cast<uint32_t>(segment)}));
  };
  if (stored != segments) {
    return absl::DataLossError(absl::StrCat(where(std::min<int64_t>(stored, segments)), ": ",
                                            stored, " segments are stored, ", rows.count_,
                                            " rows make ", segments));
  }
  for (int64_t i = 0; i < segments; ++i) {
    ASSIGN_OR_RETURN(auto segment,
                     context.Segment(layer.value(), kind, kv_head, static_cast<uint32_t>(i)));
    const int64_t expected =
        std::min(rows.segment_tokens_, rows.count_ - i * rows.segment_tokens_) * rows.row_bytes_;
    if (static_cast<int64_t>(segment->payload().size()) != expected ||
        segment->dtype() != static_cast<uint8_t>(DType::kBf16)) {
      return absl::DataLossError(absl::StrCat(where(i), ": ", segment->payload().size(),
                                              " bytes of dtype ", int{segment->dtype()},
                                              ", must be ", expected, " of bf16"));
    }
    rows.bases_.push_back(segment->payload().data());
    rows.views_.push_back(segment->view());
    rows.segments_.push_back(std::move(segment));
  }
  return rows;
}

absl::StatusOr<Rows> Rows::OpenKeys(const StoredContext& context, Layer layer, KvHead kv_head) {
  return Open(context, layer, Kind::kKeyRows, kv_head);
}

absl::StatusOr<Rows> Rows::OpenValues(const StoredContext& context, Layer layer, KvHead kv_head) {
  return Open(context, layer, Kind::kValueRows, kv_head);
}

Rows Rows::FromMemory(const uint16_t* rows, int64_t count, int64_t head_dim) {
  Rows result;
  result.count_ = count;
  result.head_dim_ = head_dim;
  result.row_bytes_ = head_dim * 2;
  result.SetSegmentTokens(std::max<int64_t>(count, 1));
  result.bases_.push_back(reinterpret_cast<const char*>(rows));
  return result;
}

absl::Status Rows::Verify(RowRange range) const {
  if (range.begin < 0 || range.begin > range.end || range.end > count_) {
    return absl::OutOfRangeError(
        absl::StrCat("rows [", range.begin, ", ", range.end, ") of ", count_));
  }
  if (segments_.empty()) return absl::OkStatus();
  AskAhead(range);
  for (Position at = range.begin; at < range.end;) {
    const int64_t segment = at / segment_tokens_;
    const Position first = segment * segment_tokens_;
    const Position end = std::min(range.end, first + segment_tokens_);
    RETURN_IF_ERROR(segments_[static_cast<size_t>(segment)]->Verify((at - first) * row_bytes_,
                                                                    (end - first) * row_bytes_));
    at = end;
  }
  return absl::OkStatus();
}

void Rows::SetSegmentTokens(int64_t tokens) {
  const auto bits = static_cast<uint64_t>(tokens);
  segment_tokens_ = tokens;
  segment_shift_ = std::has_single_bit(bits) ? std::countr_zero(bits) : -1;
}

bool Rows::sparse() const { return segments_.front()->sparse() && !fully_verified(); }

void Rows::AskAhead(RowRange range) const {
  if (segments_.empty() || range.begin < 0 || range.end > count_) return;  // Verify says so
  for (Position at = range.begin; at < range.end;) {
    const int64_t segment = at / segment_tokens_;
    const Position first = segment * segment_tokens_;
    const Position end = std::min(range.end, first + segment_tokens_);
    segments_[static_cast<size_t>(segment)]->AskAhead((at - first) * row_bytes_,
                                                      (end - first) * row_bytes_);
    at = end;
  }
}

void Rows::AskAhead(const std::vector<Position>& rows) const {
  if (segments_.empty() || !sparse()) return;
  for (const Position row : rows) AskAhead(RowRange{row, row + 1});
}

bool Rows::fully_verified() const {
  return std::all_of(segments_.begin(), segments_.end(),
                     [](const auto& segment) { return segment->fully_verified(); });
}

absl::StatusOr<uint32_t> RowsCrc(const Rows& keys, int64_t checked) {
  uint32_t crc = 0;
  if (keys.count() == 0) return crc;
  std::vector<Position> rows;
  for (int64_t i = 0; i < checked; ++i) rows.push_back(i * keys.count() / checked);
  RETURN_IF_ERROR(keys.VerifyRows(rows.data(), checked));
  for (const Position row : rows) {
    crc = ExtendCrc32c(crc, absl::string_view(static_cast<const char*>(keys.Address(row)),
                                              static_cast<size_t>(keys.row_bytes())));
  }
  return crc;
}

}  // namespace carrel::kvstore
