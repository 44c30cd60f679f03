// In place of lab/methods: each method is known by its name, and refused.
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/lab.h"
#include "decoder/select/method_type.h"
#include "decoder/select/row_selector.h"

namespace carrel::decoder {
namespace {

class AbsentMethodType final : public MethodType {
 public:
  explicit AbsentMethodType(absl::string_view name) : name_(absl::AsciiStrToLower(name)) {}
  absl::string_view name() const override { return name_; }
  absl::Status Parse(const MethodSettings&, SelectorConfig&) const override { return Absent(); }
  absl::Status ValidateCuda(const SelectorConfig&) const override { return Absent(); }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig&,
                                                    const SelectorInput&) const override {
    return Absent();
  }

 private:
  absl::Status Absent() const { return CheckLab(absl::StrCat("method=", name_)); }

  const std::string name_;
};

}  // namespace

#define CARREL_METHOD(Name)                    \
  const MethodType& Name##Method() {           \
    static const AbsentMethodType type(#Name); \
    return type;                               \
  }
#define CARREL_GPU_METHOD(Name) CARREL_METHOD(Name)
#include "lab/methods/methods.def"
#undef CARREL_METHOD
#undef CARREL_GPU_METHOD

}  // namespace carrel::decoder
