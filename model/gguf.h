// What:      reading *.gguf, memory-mapped: typed metadata and tensors; one file, or all the parts
//            of a split one (NAME-00001-of-0000N.gguf).
// Source:    the GGUF format, versions 2 and 3, little-endian: "GGUF", u32 version, u64 tensors,
//            u64 keys; per key its name, u32 type, value; per tensor its name, u32 rank, u64
//            extents (the fastest first), u32 type, u64 offset; zeros up to a multiple of the
//            alignment; data. A string is u64 bytes and the bytes, an array u32 type, u64 count and
//            the values.
// Edge:      tensors lie one behind the other in the order of the header, each at a multiple of
//            general.alignment, as every writer of the format puts them; bytes behind the last one
//            are nobody's. Metadata of a split file are the first part's.
// Errors:    NotFound no such file; InvalidArgument whatever contradicts the format: magic,
//            version, sizes and counts that exceed the file, a type of value or tensor that does
//            not exist, nesting, a key or tensor that occurs twice, offsets, parts that disagree or
//            are missing; Unimplemented a tensor type that exists and that we do not run. Each
//            names the file and the key or tensor, the value and the bound.
// Ownership: every view points into the mapping and lives as long as the Gguf it is from.
// Threads:   immutable once open.
// Cost:      reads the header alone; arrays stay where they are until they are asked for.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/mapped_file.h"
#include "kernels/layer/dequantize/dequantize.h"
#include "model/model_files.h"

namespace carrel::model {

// Values are those of the file format.
enum class GgufValueType : uint8_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// Of a number or bool; 0 for strings and arrays.
inline int64_t ScalarBytes(GgufValueType type) {
  constexpr uint8_t kBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // by type
  return kBytes[static_cast<size_t>(type)];
}

struct GgufValue {
  GgufValueType type = GgufValueType::kU8;
  // kArray: what it holds, and how many.
  GgufValueType element = GgufValueType::kU8;
  int64_t count = 0;
  // As encoded: a number's bytes, a string's characters, an array's elements one after the other.
  absl::string_view bytes;
};

// Typed, bounded reads of the metadata; messages begin with the file and the key.
class GgufMetadata {
 public:
  const std::string& where() const { return where_; }
  const std::map<std::string, GgufValue, std::less<>>& values() const { return values_; }
  const GgufValue* Find(absl::string_view key) const;  // null if absent
  bool Has(absl::string_view key) const { return Find(key) != nullptr; }

  // Any integer type. Number: any integer or float; a float is read by the fewest decimals that
  // name it, so that 1e-5 is 1e-5. A key that is absent is InvalidArgument, or the fallback.
  absl::StatusOr<int64_t> Int(absl::string_view key, int64_t min, int64_t max) const;
  absl::StatusOr<int64_t> IntOr(absl::string_view key, int64_t fallback, int64_t min,
                                int64_t max) const;
  absl::StatusOr<double> Number(absl::string_view key, double min, double max) const;
  absl::StatusOr<double> NumberOr(absl::string_view key, double fallback, double min,
                                  double max) const;
  absl::StatusOr<bool> BoolOr(absl::string_view key, bool fallback) const;
  absl::StatusOr<std::string> String(absl::string_view key) const;
  absl::StatusOr<std::vector<absl::string_view>> Strings(absl::string_view key) const;
  absl::StatusOr<std::vector<int64_t>> Ints(absl::string_view key) const;  // any integer type
  absl::StatusOr<std::vector<float>> Floats(absl::string_view key) const;  // kF32

  // "where: key=value what".
  absl::Status Invalid(absl::string_view key, absl::string_view what) const;
  absl::Status Unsupported(absl::string_view key, absl::string_view what) const;

 private:
  friend class GgufReader;
  std::string Describe(absl::string_view key, absl::string_view what) const;
  absl::StatusOr<const GgufValue*> Array(absl::string_view key) const;

  std::string where_;
  std::map<std::string, GgufValue, std::less<>> values_;
};

struct GgufTensor {
  kernels::GgufType type = kernels::GgufType::kF32;
  std::vector<int64_t> shape;  // as in safetensors: rows last to first, [out, in] of a matrix
  absl::string_view bytes;
  int64_t elements() const;
};

class Gguf {
 public:
  static absl::StatusOr<std::shared_ptr<const Gguf>> Open(const std::string& path);

  const std::string& path() const { return path_; }  // as it was given
  const GgufMetadata& metadata() const { return metadata_; }
  const std::map<std::string, GgufTensor, std::less<>>& tensors() const { return tensors_; }
  const GgufTensor* Find(absl::string_view name) const;  // null if absent
  const ModelFiles& files() const { return files_; }

 private:
  friend class GgufReader;
  absl::Status Join(Gguf part);

  std::string path_;
  ModelFiles files_;
  GgufMetadata metadata_;
  std::map<std::string, GgufTensor, std::less<>> tensors_;
};

// Whether a --model is read as a GGUF file: it is a file, or its name ends in .gguf and it is no
// folder.
bool IsGgufPath(const std::string& path);

}  // namespace carrel::model
