// What:    what a method that chooses rows says of itself: its name, its parameters, what it needs, and
//          how a selector of it is made. Everybody else asks this; methods.def lists them.
// Source:  docs/add-a-method.md, docs/methods.md.
// Errors:  InvalidArgument a parameter or its value, named; those of MakeRowSelector.
// Ownership: one object of each, for good. What a selector is made of outlives it.
// Threads: any.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/named_settings.h"
#include "common/thread_pool.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/selector_config.h"

namespace carrel::decoder {

class RowSelector;

// Parameters as they were written; each sets a field of the config.
class MethodSettings {
 public:
  using Setter = std::function<absl::Status(absl::string_view)>;
  using Setters = std::map<std::string, Setter, std::less<>>;

  explicit MethodSettings(absl::string_view text)
      : text_(text), split_(SplitNamedSettings(text_)) {}
  absl::string_view name() const { return split_.name; }
  bool Has(absl::string_view key) const;
  absl::Status Set(const Setters& setters) const;
  // An error of these settings together.
  absl::Status Refuse(absl::string_view why) const;

  static absl::Status Refused(absl::string_view value, absl::string_view wanted);
  template <typename T>
  static Setter Number(T& to, int64_t least, int64_t most) {
    return [&to, least, most](absl::string_view text) {
      int64_t value = 0;
      if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
        return Refused(text, absl::StrCat("a number in ", least, " .. ", most));
      }
      to = static_cast<T>(value);
      return absl::OkStatus();
    };
  }
  template <typename T>
  static Setter OneOf(T& to, std::vector<std::pair<std::string, T>> words) {
    return [&to, words = std::move(words)](absl::string_view text) {
      std::vector<std::string> known;
      for (const auto& [word, value] : words) {
        if (text == word) {
          to = value;
          return absl::OkStatus();
        }
        known.push_back(word);
      }
      return Refused(text, absl::StrCat("one of ", absl::StrJoin(known, ", ")));
    };
  }
  static Setter Oversample(int64_t& to);
  static Setter Mask(SelectorMask& to);

 private:
  const std::string text_;
  const NamedSettings split_;  // of text_
};

struct SelectorInput {
  AttentionShape shape;
  RowRange zone;
  const HostRows& rows;
  ThreadPool* pool = nullptr;
};

class MethodType {
 public:
  virtual ~MethodType() = default;

  virtual absl::string_view name() const = 0;
  virtual absl::Status Parse(const MethodSettings& settings, SelectorConfig& config) const = 0;
  // What a report says behind the name, such as ":rows=16".
  virtual std::string Describe(const SelectorConfig&) const { return ""; }
  // Whether it is calibrated by what prefill left beside the rows, and so needs them on a GPU too.
  virtual bool needs_host_rows(const SelectorConfig&) const { return false; }
  // Whether keys are read whenever it chooses, and not only what was made of them before; of a zone
  // that lies across a bus.
  virtual bool reads_keys(const SelectorConfig&) const { return true; }
  // Whether it chooses by keys where the document has them, and not where KeyPlacement puts them.
  virtual bool after_rope() const { return false; }
  // Whether it can choose two layers' rows at once (CudaRowSelector::Another).
  virtual bool forks() const { return false; }
  // InvalidArgument a parameter without a form on a GPU.
  virtual absl::Status ValidateCuda(const SelectorConfig& config) const;

  // config: no kAutoOversample but of codes.
  virtual absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig& config,
                                                            const SelectorInput& input) const = 0;

 protected:
  absl::Status NotOnGpu(absl::string_view field, int64_t value, absl::string_view served) const;
  absl::Status CheckCudaMask(const SelectorConfig& config) const;
};

const MethodType& MethodOf(SelectorKind kind);
inline const MethodType& MethodOf(const SelectorConfig& config) { return MethodOf(config.kind); }
absl::Span<const MethodType* const> AllMethods();  // by their SelectorKind

}  // namespace carrel::decoder
