#include "tools/carrel/help_format.h"

#include <CLI/CLI.hpp>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace carrel::tools {
namespace {

class HelpFormat final : public CLI::Formatter {
 public:
  // Without empty lines at its end.
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    return absl::StrCat(
        absl::StripTrailingAsciiWhitespace(CLI::Formatter::make_help(app, std::move(name), mode)),
        "\n");
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text;
    if (option->get_type_size() != 0) {
      const std::string type = option->get_type_name();
      absl::StrAppend(&text, " ", type.substr(0, type.find(':')));
      if (!option->get_default_str().empty())
        absl::StrAppend(&text, "=", option->get_default_str());
      if (option->get_expected_max() == CLI::detail::expected_max_vector_size)
        absl::StrAppend(&text, " ...");
    }
    if (option->get_required()) absl::StrAppend(&text, " ", get_label("REQUIRED"));
    return text;
  }
};

}  // namespace

std::shared_ptr<CLI::Formatter> MakeHelpFormat() { return std::make_shared<HelpFormat>(); }

}  // namespace carrel::tools
