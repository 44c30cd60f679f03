#include "kvstore/storage/sst_blocks.h"

#include "absl/strings/str_cat.h"
#include "common/mapped_file.h"
#include "kvstore/format/keys.h"
#include "kvstore/format/little_endian.h"

namespace carrel::kvstore {
namespace {

constexpr size_t kSequenceBytes = 8;  // behind a key: sequence number and type
constexpr size_t kTrailerBytes = 4 + 4 + 1 + 4;
constexpr size_t kMaxVarint32Bytes = 5;

// Reads the block at the front of `rest` and removes it; false if it is not as SstWriter writes it.
bool TakeBlock(absl::string_view& rest, SstEntry& entry) {
  if (rest.size() < 2 || rest[0] != 0) return false;
  const auto key_bytes = static_cast<uint8_t>(rest[1]) - kSequenceBytes;
  if (key_bytes != kKeyBytes && key_bytes != kNumberedKeyBytes) return false;
  size_t at = 2;
  uint64_t value_bytes = 0;
  for (size_t i = 0;; ++i) {
    if (i == kMaxVarint32Bytes || at == rest.size()) return false;
    const auto byte = static_cast<uint8_t>(rest[at++]);
    value_bytes |= uint64_t{byte & 0x7fu} << (7 * i);
    if ((byte & 0x80) == 0) break;
  }
  const size_t framing = key_bytes + kSequenceBytes + kTrailerBytes;
  if (value_bytes > UINT32_MAX || rest.size() - at < framing ||
      rest.size() - at - framing < value_bytes) {
    return false;
  }
  entry.key = rest.substr(at, key_bytes);
  if (LoadLittleEndian<uint64_t>(rest.data() + at + key_bytes) != 1) return false;
  at += key_bytes + kSequenceBytes;
  entry.value = rest.substr(at, value_bytes);
  at += value_bytes;
  if (LoadLittleEndian<uint32_t>(rest.data() + at) != 0 ||
      LoadLittleEndian<uint32_t>(rest.data() + at + 4) != 1 || rest[at + 8] != 0) {
    return false;
  }
  rest.remove_prefix(at + kTrailerBytes);
  return true;
}

// Asks for the heads of blocks that are likely to come.
class BlocksAhead {
 public:
  explicit BlocksAhead(absl::string_view file) : file_(file) {}

  // The next block begins at `offset`.
  void Reached(size_t offset) {
    const size_t bytes = offset - at_;
    if (bytes == bytes_ && bytes > kProofBytes && offset >= asked_) {
      for (int i = 1; i <= kBlocks && bytes < file_.size() - offset; ++i) {
        offset += bytes;
        // The end of the block before: its proof is read next.
        MappedFile::AskAhead(file_.substr(offset - kProofBytes, kProofBytes));
      }
      asked_ = offset;
    } else if (bytes != bytes_) {
      asked_ = 0;
    }
    at_ += bytes;
    bytes_ = bytes;
  }

 private:
  static constexpr int kBlocks = 64;
  static constexpr size_t kProofBytes = 4096;
  const absl::string_view file_;
  size_t at_ = 0, bytes_ = 0, asked_ = 0;
};

template <typename AtEnd>
SstEntries Walk(absl::string_view file, AtEnd at_end) {
  SstEntries result;
  BlocksAhead ahead(file);
  absl::string_view rest = file;
  for (;;) {
    const size_t offset = file.size() - rest.size();
    ahead.Reached(offset);
    SstEntry entry;
    if (!TakeBlock(rest, entry)) {
      result.status = absl::DataLossError(absl::StrCat("no valid block at offset ", offset));
      return result;
    }
    const bool fence = entry.value.empty(), first = result.last_key.empty();
    const bool last = at_end(rest, entry);
    if ((fence ? !first && !last : !DecodeKey(entry.key).ok()) ||
        (!first && entry.key <= result.last_key)) {
      result.status = absl::DataLossError(absl::StrCat("wrong key at offset ", offset));
      return result;
    }
    if (first) result.first_key = entry.key;
    result.last_key = entry.key;
    if (!fence) result.entries.push_back(entry);
    if (last) return result;
  }
}

}  // namespace

SstEntries WalkToKey(absl::string_view file, absl::string_view last_key) {
  SstEntries result = Walk(
      file, [last_key](absl::string_view, const SstEntry& entry) { return entry.key >= last_key; });
  if (result.status.ok() && result.last_key != last_key) {
    if (!result.entries.empty() && result.entries.back().key > last_key) result.entries.pop_back();
    result.status = absl::DataLossError("a key behind the last one");
  }
  return result;
}

SstEntries WalkToOffset(absl::string_view file, uint64_t data_bytes) {
  if (data_bytes > file.size()) {
    return {.status = absl::DataLossError(
                absl::StrCat("data of ", data_bytes, " bytes in a file of ", file.size()))};
  }
  return Walk(file.substr(0, data_bytes),
              [](absl::string_view rest, const SstEntry&) { return rest.empty(); });
}

}  // namespace carrel::kvstore
