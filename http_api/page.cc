#include "http_api/page.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "http_api/page_html.h"

namespace carrel::http_api {
namespace {

// As a policy names the text of the page's one element of the tag.
std::string DigestOf(const std::string& tag) {
  const std::string open = absl::StrCat("<", tag, ">");
  const size_t begin = Page().find(open) + open.size();
  const size_t end = Page().find(absl::StrCat("</", tag, ">"), begin);
  const std::string hex = Sha256Hex(Page().substr(begin, end - begin));
  return absl::StrCat("'sha256-", absl::Base64Escape(absl::HexStringToBytes(hex)), "'");
}

}  // namespace

const std::string& Page() {
  static const std::string& page = *new std::string(kPageHtml);
  return page;
}

const std::string& PagePolicy() {
  static const std::string& policy = *new std::string(absl::StrCat(
      "default-src 'none'; script-src ", DigestOf("script"), "; style-src ", DigestOf("style"),
      "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
      "frame-ancestors 'none'"));
  return policy;
}

}  // namespace carrel::http_api
