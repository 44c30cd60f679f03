#include "kvstore/format/keys.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/format/big_endian.h"

namespace carrel::kvstore {
namespace {

constexpr absl::string_view kUnknown = "unknown";

bool IsOfWholeContext(Kind kind) { return kind == Kind::kManifest || kind == Kind::kTokenIds; }

bool IsOfAHead(Kind kind) { return !IsOfWholeContext(kind) && kind != Kind::kQueryDrift; }

}  // namespace

absl::string_view KindName(Kind kind) {
  static constexpr std::pair<Kind, absl::string_view> kNames[] = {
      {Kind::kManifest, "manifest"},
      {Kind::kTokenIds, "token ids"},
      {Kind::kKeyRows, "K rows"},
      {Kind::kValueRows, "V rows"},
      {Kind::kSampledQueries, "sampled queries"},
      {Kind::kIndex, "index"},
      {Kind::kSummaries, "summaries"},
      {Kind::kQueryDrift, "query drift"}};
  for (const auto& [of, name] : kNames) {
    if (of == kind) return name;
  }
  return kUnknown;
}

absl::Status ValidateKey(const SegmentKey& key) {
  if (KindName(key.kind) == kUnknown) {
    return absl::InvalidArgumentError(
        absl::StrCat("key: kind ", static_cast<int>(key.kind), " is unknown"));
  }
  const bool whole = IsOfWholeContext(key.kind);
  if (key.layer < -1 || key.layer > kMaxLayer || (key.layer == -1) != whole) {
    return absl::InvalidArgumentError(
        absl::StrCat("key: ", KindName(key.kind), " in layer ", key.layer, ", must be ",
                     whole ? "-1" : absl::StrCat("0 .. ", kMaxLayer)));
  }
  const int32_t max_head = IsOfAHead(key.kind) ? kMaxKvHead : 0;
  if (key.kv_head.value() < 0 || key.kv_head.value() > max_head) {
    return absl::InvalidArgumentError(absl::StrCat("key: ", KindName(key.kind), " of kv_head ",
                                                   key.kv_head.value(), ", must be 0 .. ",
                                                   max_head));
  }
  if (key.kind == Kind::kManifest && key.segment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("key: manifest segment ", key.segment, ", must be 0"));
  }
  return absl::OkStatus();
}

std::string EncodeKey(const SegmentKey& key) {
  CARREL_CHECK(ValidateKey(key).ok());
  std::string out = key.context.Bytes();
  AppendBigEndian(out, static_cast<uint64_t>(int64_t{key.layer} + 1), 2);
  AppendBigEndian(out, static_cast<uint64_t>(key.kind), 1);
  AppendBigEndian(out, static_cast<uint64_t>(key.kv_head.value()), 2);
  AppendBigEndian(out, key.segment, 4);
  return out;
}

absl::StatusOr<ContextId> ContextOfKey(absl::string_view bytes) {
  const bool numbered = bytes.size() == static_cast<size_t>(kNumberedKeyBytes);
  if (!numbered && bytes.size() != static_cast<size_t>(kKeyBytes)) {
    return absl::DataLossError(absl::StrCat("key of ", bytes.size(), " bytes, must be ", kKeyBytes,
                                            " or ", kNumberedKeyBytes, ": ",
                                            absl::BytesToHexString(bytes.substr(0, 32))));
  }
  const std::optional<ContextId> id = ContextId::FromBytes(bytes.substr(0, numbered ? 8 : 16));
  if (id.has_value()) return *id;
  return absl::DataLossError(
      absl::StrCat("key with the id of no context: ", absl::BytesToHexString(bytes)));
}

std::string BytesBefore(absl::string_view key) {
  std::string bytes(key);
  for (size_t i = bytes.size(); i > 0; --i) {
    if (bytes[i - 1]-- != '\0') break;
  }
  return bytes;
}

std::string BytesAfter(absl::string_view key) {
  std::string bytes(key);
  for (size_t i = bytes.size(); i > 0; --i) {
    if (++bytes[i - 1] != '\0') break;
  }
  return bytes;
}

absl::StatusOr<SegmentKey> DecodeKey(absl::string_view bytes) {
  SegmentKey key;
  ASSIGN_OR_RETURN(key.context, ContextOfKey(bytes));
  const absl::string_view rest = bytes.substr(bytes.size() - 9);
  key.layer = static_cast<int32_t>(LoadBigEndian(rest.substr(0, 2))) - 1;
  key.kind = static_cast<Kind>(LoadBigEndian(rest.substr(2, 1)));
  key.kv_head = KvHead(static_cast<int32_t>(LoadBigEndian(rest.substr(3, 2))));
  key.segment = static_cast<uint32_t>(LoadBigEndian(rest.substr(5, 4)));
  if (const absl::Status valid = ValidateKey(key); !valid.ok()) {
    return absl::DataLossError(absl::StrCat(valid.message(), ": ", absl::BytesToHexString(bytes)));
  }
  return key;
}

std::pair<std::string, std::string> ContextKeyRange(ContextId context) {
  std::string begin = context.Bytes();
  const bool last = begin.find_first_not_of('\xff') == std::string::npos;
  // Behind every key, or where the next id's keys begin.
  std::string end = last ? std::string(kKeyBytes + 1, '\xff') : BytesAfter(begin);
  return {std::move(begin), std::move(end)};
}

std::string DescribeKey(const SegmentKey& key) {
  std::string text(KindName(key.kind));
  if (key.layer >= 0) absl::StrAppend(&text, ", layer ", key.layer);
  if (IsOfAHead(key.kind)) absl::StrAppend(&text, ", kv_head ", key.kv_head.value());
  if (key.kind != Kind::kManifest) absl::StrAppend(&text, ", segment ", key.segment);
  return text;
}

}  // namespace carrel::kvstore
