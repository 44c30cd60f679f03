// What:   the folder of an unfinished prefill job, STORE/prefill/NAME: what is kept so that an
//         interrupted job goes on at its last finished layer.
// Bytes:  job               serialized v1::Manifest: what is being computed, without what only the
//                           end knows
//         layer-NNNN.sst, layer-NNNN-P.sst
//                           the layer's segments, in one file or several
//         layer-NNNN        serialized v1::Manifest with the layer's sizes and statistics, written
//                           after its SSTs were synced
//         hidden-NNNN       the hidden state that enters layer NNNN: f32 [tokens, hidden_size], the
//                           probe's behind the document's;
//                           of the tokens that give the drift, what entered the layer before: f32
//                           [samples, hidden_size]; the SHA-256 of both (32 bytes)
//         entering-NNNN     of the tokens that are to be computed again (recheck.h), what entered
//                           layer NNNN: f32 [tokens, hidden_size]; its SHA-256. Written before the
//                           layer's fragment, kept until publication
// Errors: FailedPrecondition an earlier job of the same name had another input (names what
//         differs); ResourceExhausted disk full; as common/file.h.
// Threads: the layer writer and the job's thread use different files.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "kvstore/storage/unfinished.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::prefill {

class Staging {
 public:
  static constexpr int kMaxSstParts = 16;
  // Creates the folder, or finds an interrupted job in it. It is this object's and its copies' until
  // they are gone. FailedPrecondition: somebody else works in it.
  static absl::StatusOr<Staging> Open(const std::string& store_folder, const std::string& name);

  // The job found, or NotFound. Its context_id is to be used on.
  absl::StatusOr<v1::Manifest> ReadJob() const;
  absl::Status WriteJob(const v1::Manifest& job) const;

  std::string SstPath(Layer layer) const;
  // Of one of several more files of the layer; part: 0 .. kMaxSstParts - 1, without gaps.
  std::string SstPartPath(Layer layer, int part) const;
  // The layer's files that are there, SstPath first.
  std::vector<std::string> SstPaths(Layer layer) const;
  // Whatever an interrupted job left of the layer.
  absl::Status RemoveSsts(Layer layer) const;
  std::string ContextSstPath() const;
  absl::Status WriteFragment(Layer layer, const v1::Manifest& fragment) const;
  absl::StatusOr<v1::Manifest> ReadFragment(Layer layer) const;
  void DropLayer(Layer layer) const;
  // Layers 0 .. n-1 have a fragment.
  int32_t FinishedLayers(int32_t layers) const;

  // The state that enters `layer`. A file that does not verify, or has not just so many floats, is
  // DataLoss.
  absl::Status WriteHidden(Layer layer, absl::Span<const float> hidden,
                           absl::Span<const float> before) const;
  absl::Status ReadHidden(Layer layer, std::vector<float>& hidden,
                          std::vector<float>& before) const;
  void DropHidden(Layer layer) const;

  // What entered a layer, of the tokens that are computed again; `floats` of them. As ReadHidden.
  absl::Status WriteEntering(Layer layer, absl::Span<const float> entering) const;
  absl::StatusOr<std::vector<float>> ReadEntering(Layer layer, size_t floats) const;

  absl::Status Remove() const;  // the whole folder
  absl::Status Empty();         // as Open makes it; it stays this object's
  const std::string& folder() const { return folder_; }

 private:
  Staging(std::string store_folder, std::string name, std::string folder, kvstore::FolderLock lock)
      : store_folder_(std::move(store_folder)),
        name_(std::move(name)),
        folder_(std::move(folder)),
        lock_(std::make_shared<kvstore::FolderLock>(std::move(lock))) {}
  std::string LayerPath(const char* kind, Layer layer) const;
  std::string store_folder_, name_, folder_;
  std::shared_ptr<const kvstore::FolderLock> lock_;
};

// OK if both describe the same computation; otherwise FailedPrecondition naming the first field
// that differs with both values.
absl::Status SameJob(const v1::Manifest& found, const v1::Manifest& wanted);

}  // namespace carrel::prefill
