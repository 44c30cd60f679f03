// What:   what a kind of index says of itself, one object per kind: its name, the parameters it
//         takes, how it is built and opened, and what it costs. index_kinds.def lists them; nothing
//         else in the program asks which kind an index is in order to treat it as such
//         (docs/add-an-index.md).
// Errors: as index.h says of the functions that call these.
// Threads: reentrant; the objects live as long as the program.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

// A parameter of IndexParams that a kind takes, as v1.IndexSpec calls it.
struct IndexField {
  const char* name;
  int64_t value;
  absl::string_view word = "";  // of an enumeration; otherwise empty
};

// Nanoseconds per row and q head of the group, on 2 AVX-512 cores at head_dim 128: read in order, at
// random by the group, at random by one head that goes from link to link (21 times kInOrderNs there,
// 26 times at head_dim 64).
inline constexpr double kInOrderNs = 2.2, kAtRandomNs = 10, kWalkedNs = 46;

class IndexType {
 public:
  virtual ~IndexType() = default;

  virtual absl::string_view name() const = 0;
  // Of the lab: what no real document was seen to gain by (docs/methods.md).
  virtual bool lab() const { return false; }
  // What it is in a few words, for people.
  virtual std::string Describe(const IndexParams& params) const = 0;
  // Those that it takes beside the effort.
  virtual std::vector<IndexField> Fields(const IndexParams&) const { return {}; }
  virtual absl::Status Validate(const IndexParams&) const { return absl::OkStatus(); }
  // Whether this program builds it; what it cannot build it may still open.
  virtual absl::Status CheckBuild(const IndexParams&) const { return absl::OkStatus(); }

  virtual absl::StatusOr<std::string> Build(const IndexParams& params, const Rows& keys,
                                            const SampledQueries* queries,
                                            Accelerator* accelerator) const = 0;
  virtual absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                                      Rows keys) const = 0;
  // Has no blob: every search is the exact one.
  virtual bool exact() const { return false; }
  // A search reads few rows and, from its blob, knows them before; others read all, or go from row to
  // row.
  virtual bool reads_few() const { return false; }
  // `auto` tries it (auto_index.h).
  virtual bool automatic() const { return false; }
  // Its blob depends on sampled queries.
  virtual bool learns(const IndexParams&) const { return false; }

  // What effort counts; DefaultEffort and the least of a search for top_k rows; where `auto` begins
  // to try (auto_index.h).
  virtual absl::string_view effort_word() const = 0;
  virtual int64_t DefaultEffort(const IndexParams& params, int64_t top_k, int64_t rows) const = 0;
  virtual int64_t LeastEffort(int64_t top_k) const { return top_k; }
  virtual int64_t FirstEffort(int64_t wanted) const { return wanted; }

  // About what a search took on a reference machine, from what it visited: nanoseconds.
  virtual double SearchNs(const IndexParams& params, const SearchResult& result, int64_t group,
                          int64_t zone_rows) const = 0;
  // About how many bytes a blob has per key: for planning disk space.
  virtual int64_t BytesPerKey(const IndexParams& params, int64_t head_dim) const = 0;
  // Of a blob beside its keys, about.
  virtual int64_t FixedBytes(const IndexParams& /*params*/, int64_t /*head_dim*/) const {
    return exact() ? 0 : 4096;
  }
  // That opening one takes at most.
  virtual int64_t HeapBytes(int64_t blob_bytes) const { return blob_bytes; }
};

// One without a blob: there is no effort to choose.
class ExactIndexType : public IndexType {
 public:
  bool exact() const override { return true; }
  absl::string_view effort_word() const override { return "every row scored"; }
  int64_t DefaultEffort(const IndexParams&, int64_t, int64_t) const override { return 0; }
  int64_t LeastEffort(int64_t) const override { return 0; }
  int64_t FirstEffort(int64_t) const override { return 0; }
  double SearchNs(const IndexParams&, const SearchResult& result, int64_t, int64_t) const override {
    return kInOrderNs * static_cast<double>(result.visited);
  }
  int64_t BytesPerKey(const IndexParams&, int64_t) const override { return 0; }
  int64_t HeapBytes(int64_t) const override { return 0; }
};

// Null: no such kind, which only a number from outside can be.
const IndexType* FindIndexType(IndexKind kind);
const IndexType& IndexTypeOf(IndexKind kind);

// InvalidArgument names field, value and bounds.
absl::Status CheckIndexField(absl::string_view field, int64_t value, int64_t low, int64_t high);

}  // namespace carrel::kvstore
