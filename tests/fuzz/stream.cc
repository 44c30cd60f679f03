// The stream that `carrel import` takes from a file or a pipe (kvstore/storage/context_stream.h). Its digests are
// put right, so that what they cover is looked at.
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "kvstore/storage/context_import.h"
#include "kvstore/storage/context_stream.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/store_test_util.h"
#include "tests/fuzz/target.h"

namespace carrel::fuzz {
namespace {

using namespace carrel::kvstore;  // NOLINT: all of this file is about it

constexpr size_t kDigest = kStreamDigestBytes;

void PutDigest(std::string& bytes, size_t begin, size_t end) {
  const std::string digest =
      absl::HexStringToBytes(Sha256Hex(absl::string_view(bytes).substr(begin, end - begin)));
  bytes.replace(end, kDigest, digest);
}

// The stream with every digest that it has room for made right.
std::string WithDigests(std::string bytes) {
  int64_t header = 0;
  for (int i = 0; i < 3; ++i) {
    const auto wanted =
        StreamHeader::BytesWanted(absl::string_view(bytes).substr(0, static_cast<size_t>(header)));
    if (!wanted.ok() || *wanted > static_cast<int64_t>(bytes.size())) return bytes;
    if (*wanted == header) break;
    header = *wanted;
  }
  if (header < static_cast<int64_t>(kDigest)) return bytes;
  PutDigest(bytes, 0, static_cast<size_t>(header) - kDigest);
  const auto decoded =
      StreamHeader::Decode(absl::string_view(bytes).substr(0, static_cast<size_t>(header)));
  if (!decoded.ok()) return bytes;
  size_t at = static_cast<size_t>(header);
  for (const int64_t file : decoded->file_bytes) {
    const auto size = static_cast<size_t>(file);
    if (file < 0 || size > bytes.size() || at + size + kDigest > bytes.size()) return bytes;
    PutDigest(bytes, at, at + size);
    at += size + kDigest;
  }
  return bytes;
}

void RunStream(absl::string_view bytes) {
  const std::string stream = WithDigests(std::string(bytes));
  const std::string folder = Folder() + "/importing";
  std::filesystem::create_directories(folder);
  const auto import = MakeContextImport(
      folder, "",
      {.check_free = [](const std::string&, ContextId, int64_t) { return absl::OkStatus(); },
       .publish = [](const std::string&, const std::string&,
                     const std::vector<std::string>& files) -> absl::StatusOr<v1::Manifest> {
         for (const std::string& file : files) CARREL_FUZZ_CHECK(std::filesystem::exists(file));
         return absl::DataLossError("not published here");
       }});
  absl::Status status;
  while (status.ok() && import->position() < static_cast<int64_t>(stream.size())) {
    const int64_t before = import->position();
    CARREL_FUZZ_CHECK(before >= 0);
    status = import->Take(absl::string_view(stream).substr(static_cast<size_t>(before), 700));
    CARREL_FUZZ_CHECK(!status.ok() || import->position() > before);
    if (import->bytes() > 0 && import->position() >= import->bytes()) break;
  }
  if (status.ok() && import->bytes() > 0 && import->position() == import->bytes()) {
    (void)import->Publish();
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
}

std::vector<std::string> StreamSeeds() {
  const std::string folder = Folder() + "/exported";
  std::filesystem::create_directories(folder);
  const auto store = Store::Open(folder + "/store", StoreMode::kReadWrite);
  CARREL_FUZZ_CHECK(store.ok());
  const TestContextSpec spec{
      .layers = 1, .kv_heads = 1, .head_dim = 4, .tokens = 8, .segment_tokens = 8};
  if (!(*store)->OpenContext(spec.name).ok()) {
    CARREL_FUZZ_CHECK(PublishTestContext(**store, folder + "/staging", spec).ok());
  }
  const auto out = (*store)->Export(spec.name);
  CARREL_FUZZ_CHECK(out.ok());
  std::string stream;
  for (;;) {
    const auto piece = (*out)->Next();
    CARREL_FUZZ_CHECK(piece.ok());
    if (piece->empty()) break;
    stream.append(piece->data(), piece->size());
  }
  return {stream};
}

CARREL_FUZZ_TARGET(stream, RunStream, StreamSeeds);

}  // namespace
}  // namespace carrel::fuzz
