#include "kvstore/format/keys.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

void AppendBigEndian(std::string& out, uint64_t value, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out.push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t LoadBigEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (const char c : bytes) value = value << 8 | static_cast<uint8_t>(c);
  return value;
}

bool IsKnown(Kind kind) {
  switch (kind) {
    case Kind::kManifest:
    case Kind::kTokenIds:
    case Kind::kKeyRows:
    case Kind::kValueRows:
    case Kind::kSampledQueries:
    case Kind::kIndex:
    case Kind::kSummaries:
    case Kind::kQueryDrift:
      return true;
  }
  return false;
}

bool IsOfWholeContext(Kind kind) { return kind == Kind::kManifest || kind == Kind::kTokenIds; }

bool IsOfAHead(Kind kind) { return !IsOfWholeContext(kind) && kind != Kind::kQueryDrift; }

}  // namespace

absl::string_view KindName(Kind kind) {
  switch (kind) {
    case Kind::kManifest:
      return "manifest";
    case Kind::kTokenIds:
      return "token ids";
    case Kind::kKeyRows:
      return "K rows";
    case Kind::kValueRows:
      return "V rows";
    case Kind::kSampledQueries:
      return "sampled queries";
    case Kind::kIndex:
      return "index";
    case Kind::kSummaries:
      return "summaries";
    case Kind::kQueryDrift:
      return "query drift";
  }
  return "unknown";
}

absl::Status ValidateKey(const SegmentKey& key) {
  if (!IsKnown(key.kind)) {
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
  std::string out;
  out.reserve(kKeyBytes);
  AppendBigEndian(out, key.context.value(), 8);
  AppendBigEndian(out, static_cast<uint64_t>(key.layer + 1), 2);
  AppendBigEndian(out, static_cast<uint64_t>(key.kind), 1);
  AppendBigEndian(out, static_cast<uint64_t>(key.kv_head.value()), 2);
  AppendBigEndian(out, key.segment, 4);
  return out;
}

absl::StatusOr<ContextId> ContextOfKey(absl::string_view bytes) {
  if (bytes.size() != static_cast<size_t>(kKeyBytes)) {
    return absl::DataLossError(absl::StrCat("key of ", bytes.size(), " bytes, must be ", kKeyBytes,
                                            ": ", absl::BytesToHexString(bytes.substr(0, 32))));
  }
  return ContextId(LoadBigEndian(bytes.substr(0, 8)));
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
  key.layer = static_cast<int32_t>(LoadBigEndian(bytes.substr(8, 2))) - 1;
  key.kind = static_cast<Kind>(LoadBigEndian(bytes.substr(10, 1)));
  key.kv_head = KvHead(static_cast<int32_t>(LoadBigEndian(bytes.substr(11, 2))));
  key.segment = static_cast<uint32_t>(LoadBigEndian(bytes.substr(13, 4)));
  if (const absl::Status valid = ValidateKey(key); !valid.ok()) {
    return absl::DataLossError(absl::StrCat(valid.message(), ": ", absl::BytesToHexString(bytes)));
  }
  return key;
}

std::pair<std::string, std::string> ContextKeyRange(ContextId context) {
  std::string begin, end;
  AppendBigEndian(begin, context.value(), 8);
  if (context.value() == UINT64_MAX) {
    end.assign(kKeyBytes + 1, '\xff');  // behind every key
  } else {
    AppendBigEndian(end, context.value() + 1, 8);
  }
  return {begin, end};
}

std::string DescribeKey(const SegmentKey& key) {
  std::string text(KindName(key.kind));
  if (key.layer >= 0) absl::StrAppend(&text, ", layer ", key.layer);
  if (IsOfAHead(key.kind)) absl::StrAppend(&text, ", kv_head ", key.kv_head.value());
  if (key.kind != Kind::kManifest) absl::StrAppend(&text, ", segment ", key.segment);
  return text;
}

}  // namespace carrel::kvstore
