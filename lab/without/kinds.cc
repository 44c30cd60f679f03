// In place of lab/kinds: each kind is known by its name. A context that holds one is searched row by row, beside whatever
// its index holds; none is built.
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/lab.h"
#include "kvstore/index/index_type.h"

namespace carrel::kvstore {
namespace {

class AbsentIndexType final : public ExactIndexType {
 public:
  explicit AbsentIndexType(absl::string_view name) : name_(absl::AsciiStrToLower(name)) {}

  absl::string_view name() const override { return name_; }
  bool lab() const override { return true; }
  std::string Describe(const IndexParams&) const override {
    return "of the lab, which this carrel was built without: every row scored";
  }
  absl::Status CheckBuild(const IndexParams&) const override {
    return CheckLab(absl::StrCat("index kind ", name_));
  }

  absl::StatusOr<std::string> Build(const IndexParams& params, const Rows&, const SampledQueries*,
                                    Accelerator*) const override {
    return CheckBuild(params);
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams&, Blob, Rows keys) const override {
    return OpenIndex({.kind = IndexKind::kFlat}, Blob(), std::move(keys));
  }

 private:
  const std::string name_;
};

}  // namespace

#define CARREL_INDEX_KIND(Name, folder)       \
  const IndexType& Name##IndexType() {        \
    static const AbsentIndexType type(#Name); \
    return type;                              \
  }
#include "lab/kinds/kinds.def"
#undef CARREL_INDEX_KIND

}  // namespace carrel::kvstore
