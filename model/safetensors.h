// What:      reading and writing *.safetensors, memory-mapped: one file, or shards with
//            model.safetensors.index.json.
// Source:    the safetensors format: u64 header length, JSON header, data; see docs/formats.md.
// Edge:      as its reference reader has it, every byte of the data belongs to exactly one tensor.
// Errors:    NotFound no such file or tensor; InvalidArgument a bad header, overlapping or
//            out-of-range offsets, a truncated file, an unknown dtype, a tensor that occurs twice,
//            an index and shards that disagree. Every message names file and tensor.
// Ownership: a TensorView points into the mapping and lives as long as the Safetensors it is from.
// Threads:   immutable once open.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/dtype.h"
#include "common/mapped_file.h"
#include "model/model_files.h"

namespace carrel::model {

struct TensorView {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  absl::string_view bytes;   // row-major, little-endian, maybe unaligned
  int64_t elements() const;  // the product of shape, which the reader has checked against bytes
  bool floating() const {
    return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBf16;
  }
};

// As messages and digests have it.
std::string ShapeText(absl::Span<const int64_t> shape);

class Safetensors {
 public:
  static absl::StatusOr<Safetensors> OpenFile(const std::string& path);
  // model.safetensors, or every shard of model.safetensors.index.json.
  static absl::StatusOr<Safetensors> OpenModel(const std::string& model_dir);
  // Tensors from elsewhere, whose bytes the caller keeps.
  static Safetensors Of(std::map<std::string, TensorView, std::less<>> tensors);

  absl::StatusOr<TensorView> Get(absl::string_view name) const;
  bool Has(absl::string_view name) const;
  const std::map<std::string, TensorView, std::less<>>& tensors() const {
    return tensors_;
  }                                                   // ordered by name
  const ModelFiles& files() const { return files_; }  // none of Of

 private:
  ModelFiles files_;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

struct NamedTensor {
  std::string name;
  TensorView view;
};
// Writes one file atomically (name.tmp, sync, rename); tensors in the given order.
absl::Status WriteSafetensors(const std::string& path, absl::Span<const NamedTensor> tensors);

}  // namespace carrel::model
