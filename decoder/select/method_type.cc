#include "decoder/select/method_type.h"

#include <algorithm>
#include <array>

#include "common/status.h"

namespace carrel::decoder {

#define CARREL_METHOD(Name) const MethodType& Name##Method();
#define CARREL_GPU_METHOD(Name) CARREL_METHOD(Name)
#include "decoder/select/methods.def"
#undef CARREL_METHOD

absl::Span<const MethodType* const> AllMethods() {
#define CARREL_METHOD(Name) &Name##Method(),
  static const std::array methods = {
#include "decoder/select/methods.def"
  };
#undef CARREL_METHOD
#undef CARREL_GPU_METHOD
  return methods;
}

const MethodType& MethodOf(SelectorKind kind) { return *AllMethods()[static_cast<size_t>(kind)]; }

bool MethodSettings::Has(absl::string_view key) const {
  return std::any_of(split_.settings.begin(), split_.settings.end(),
                     [&](const auto& setting) { return setting.first == key; });
}

absl::Status MethodSettings::Set(const Setters& setters) const {
  for (const auto& [key, value] : split_.settings) {
    const auto setter = setters.find(key);
    if (setter == setters.end()) return NoSuchParameter("method", text_, name(), key, setters);
    RETURN_IF_ERROR(Annotate(setter->second(value), absl::StrCat("method=", text_, ": ", key)));
  }
  return absl::OkStatus();
}

absl::Status MethodSettings::Refuse(absl::string_view why) const {
  return absl::InvalidArgumentError(absl::StrCat("method=", text_, ": ", why));
}

absl::Status MethodSettings::Refused(absl::string_view value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat("\"", value, "\" is not ", wanted));
}

MethodSettings::Setter MethodSettings::Oversample(int64_t& to) {
  return [&to](absl::string_view text) {
    if (text == "auto") {
      to = kAutoOversample;
      return absl::OkStatus();
    }
    return Number(to, 1, kMaxOversample)(text);
  };
}

MethodSettings::Setter MethodSettings::Mask(SelectorMask& to) {
  return OneOf<SelectorMask>(
      to, {{"kv-head", SelectorMask::kKvHead}, {"q-head", SelectorMask::kQHead}});
}

absl::Status MethodType::ValidateCuda(const SelectorConfig&) const {
  return absl::InvalidArgumentError(
      absl::StrCat("method=", name(), " has no CUDA form; --zone host on the CPU serves it"));
}

absl::Status MethodType::NotOnGpu(absl::string_view field, int64_t value,
                                  absl::string_view served) const {
  return absl::InvalidArgumentError(absl::StrCat("method=", name(), ": ", field, "=", value,
                                                 " has no CUDA form; zone=device serves ", served,
                                                 ", zone=host every value"));
}

absl::Status MethodType::CheckCudaMask(const SelectorConfig& config) const {
  if (config.mask == SelectorMask::kKvHead) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "method=", name(), ": mask=q-head has no CUDA form; device=cpu with zone=host has it"));
}

}  // namespace carrel::decoder
