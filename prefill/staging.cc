#include "prefill/staging.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/mapped_file.h"
#include "common/status.h"

namespace carrel::prefill {
namespace {

namespace fs = std::filesystem;

absl::StatusOr<v1::Manifest> ReadMessage(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  v1::Manifest message;
  if (!message.ParseFromString(bytes)) {
    return absl::DataLossError(
        absl::StrCat(path, ": not what prefill wrote (", bytes.size(), " bytes)"));
  }
  return message;
}

std::array<uint8_t, 32> Digest(absl::string_view bytes, absl::string_view more) {
  Sha256 sha;
  sha.Update(bytes);
  sha.Update(more);
  return sha.Finish();
}

absl::string_view BytesOf(absl::Span<const float> floats) {
  return {reinterpret_cast<const char*>(floats.data()), floats.size() * sizeof(float)};
}

// Two arrays and the SHA-256 of both.
absl::Status WriteFloats(const std::string& path, absl::Span<const float> first,
                         absl::Span<const float> second) {
  const std::array<uint8_t, 32> digest = Digest(BytesOf(first), BytesOf(second));
  return WriteFileAtomically(
      path, {BytesOf(first), BytesOf(second),
             absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size())});
}

absl::Status ReadFloats(const std::string& path, absl::Span<float> first,
                        absl::Span<float> second) {
  ASSIGN_OR_RETURN(const std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  const size_t of_first = first.size() * sizeof(float);
  const size_t wanted = of_first + second.size() * sizeof(float);
  const absl::string_view bytes = file->bytes();
  if (bytes.size() != wanted + 32) {
    return absl::DataLossError(
        absl::StrCat(path, ": ", bytes.size(), " bytes, expected ", wanted + 32));
  }
  const std::array<uint8_t, 32> digest = Digest(bytes.substr(0, wanted), {});
  if (std::memcmp(digest.data(), bytes.data() + wanted, digest.size()) != 0) {
    return absl::DataLossError(absl::StrCat(path, ": its SHA-256 does not match"));
  }
  std::copy_n(bytes.data(), of_first, reinterpret_cast<char*>(first.data()));
  std::copy_n(bytes.data() + of_first, wanted - of_first, reinterpret_cast<char*>(second.data()));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Staging> Staging::Open(const std::string& store_folder, const std::string& name) {
  const std::string folder = kvstore::UnfinishedFolder(store_folder, name);
  // Hidden states and rows tell the document.
  RETURN_IF_ERROR(MakePrivateFolder(folder));
  // Who only looks at it is gone at once.
  absl::StatusOr<kvstore::FolderLock> lock = kvstore::FolderLock::Take(folder, absl::Seconds(1));
  if (!lock.ok()) return Annotate(lock.status(), absl::StrCat("prefill of \"", name, "\""));
  return Staging(store_folder, name, folder, *std::move(lock));
}

std::string Staging::LayerPath(const char* kind, Layer layer) const {
  return absl::StrFormat("%s/%s-%04d", folder_, kind, layer.value());
}
std::string Staging::SstPath(Layer layer) const { return LayerPath("layer", layer) + ".sst"; }
std::string Staging::SstPartPath(Layer layer, int part) const {
  return absl::StrFormat("%s-%d.sst", LayerPath("layer", layer), part);
}
std::vector<std::string> Staging::SstPaths(Layer layer) const {
  std::vector<std::string> paths{SstPath(layer)};
  for (int part = 0; part < kMaxSstParts && fs::exists(SstPartPath(layer, part)); ++part) {
    paths.push_back(SstPartPath(layer, part));
  }
  return paths;
}
absl::Status Staging::RemoveSsts(Layer layer) const {
  std::vector<std::string> paths{SstPath(layer)};
  // Also behind a gap: parts are written at the same time.
  for (int part = 0; part < kMaxSstParts; ++part) paths.push_back(SstPartPath(layer, part));
  for (const std::string& path : paths) {
    std::error_code error;
    fs::remove(path, error);
    if (error) return ErrnoStatus(error.value(), absl::StrCat("remove ", path));
  }
  return absl::OkStatus();
}
std::string Staging::ContextSstPath() const { return folder_ + "/context.sst"; }

absl::StatusOr<v1::Manifest> Staging::ReadJob() const { return ReadMessage(folder_ + "/job"); }
absl::Status Staging::WriteJob(const v1::Manifest& job) const {
  return WriteFileAtomically(folder_ + "/job", job.SerializeAsString());
}
absl::Status Staging::WriteFragment(Layer layer, const v1::Manifest& fragment) const {
  return WriteFileAtomically(LayerPath("layer", layer), fragment.SerializeAsString());
}
absl::StatusOr<v1::Manifest> Staging::ReadFragment(Layer layer) const {
  return ReadMessage(LayerPath("layer", layer));
}

void Staging::DropLayer(Layer layer) const {
  std::error_code ignored;
  fs::remove(LayerPath("layer", layer), ignored);
}

int32_t Staging::FinishedLayers(int32_t layers) const {
  int32_t finished = 0;
  while (finished < layers && fs::exists(LayerPath("layer", Layer(finished))) &&
         fs::exists(SstPath(Layer(finished)))) {
    ++finished;
  }
  return finished;
}

absl::Status Staging::WriteHidden(Layer layer, absl::Span<const float> hidden,
                                  absl::Span<const float> before) const {
  return WriteFloats(LayerPath("hidden", layer), hidden, before);
}

absl::Status Staging::ReadHidden(Layer layer, std::vector<float>& hidden,
                                 std::vector<float>& before) const {
  return ReadFloats(LayerPath("hidden", layer), absl::MakeSpan(hidden), absl::MakeSpan(before));
}

absl::Status Staging::WriteEntering(Layer layer, absl::Span<const float> entering) const {
  return WriteFloats(LayerPath("entering", layer), entering, {});
}

absl::StatusOr<std::vector<float>> Staging::ReadEntering(Layer layer, size_t floats) const {
  std::vector<float> entering(floats);
  RETURN_IF_ERROR(ReadFloats(LayerPath("entering", layer), absl::MakeSpan(entering), {}));
  return entering;
}

void Staging::DropHidden(Layer layer) const {
  std::error_code ignored;
  fs::remove(LayerPath("hidden", layer), ignored);
}

absl::Status Staging::Remove() const {
  std::error_code error;
  fs::remove_all(folder_, error);
  if (error) return ErrnoStatus(error.value(), absl::StrCat("remove ", folder_));
  return absl::OkStatus();
}

absl::Status Staging::Empty() {
  RETURN_IF_ERROR(Remove());
  ASSIGN_OR_RETURN(*this, Open(store_folder_, name_));
  return absl::OkStatus();
}

absl::Status SameJob(const v1::Manifest& found, const v1::Manifest& wanted) {
  google::protobuf::util::MessageDifferencer differencer;
  std::string difference;
  differencer.ReportDifferencesToString(&difference);
  differencer.IgnoreField(v1::Manifest::descriptor()->FindFieldByName("context_id"));
  differencer.IgnoreField(v1::Manifest::descriptor()->FindFieldByName("program_version"));
  if (differencer.Compare(found, wanted)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("an interrupted prefill of \"", wanted.name(),
                   "\" had another input; to discard it pass --restart:\n", difference));
}

}  // namespace carrel::prefill
