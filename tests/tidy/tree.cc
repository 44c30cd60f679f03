#include "tests/tidy/tree.h"

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/file.h"

namespace carrel::tidy {
namespace {

namespace fs = std::filesystem;

bool LeftOut(const std::string& path, const std::string& name) {
  if (name[0] == '.') return name != ".ci" && name != ".clang-format";
  return path == "build" || path == "out" || name == "__pycache__";
}

bool IsText(const std::string& path) {
  static const char* const kExtensions[] = {".h",  ".cc",  ".cu",    ".cuh",   ".md",   ".py",
                                            ".sh", ".txt", ".cmake", ".proto", ".yaml", ".service"};
  const std::string extension = fs::path(path).extension().string();
  if (extension.empty()) return true;  // scripts; what is none is told by its first bytes
  return std::find(std::begin(kExtensions), std::end(kExtensions), extension) !=
         std::end(kExtensions);
}

void ReadOne(const fs::path& at, const std::string& path, Tree& tree) {
  constexpr uintmax_t kLargest = 1 << 20;
  if (!IsText(path) || fs::file_size(at) > kLargest) return;
  auto text = ReadFile(at.string());
  if (!text.ok()) return;
  const bool script = absl::StartsWith(*text, "#!") || at.filename() == "Containerfile";
  if (fs::path(path).extension().empty() && !script) return;
  TextFile file{.path = path, .text = *std::move(text)};
  file.lines = absl::StrSplit(file.text, '\n');
  tree.files.push_back(std::move(file));
}

}  // namespace

bool TextFile::Is(absl::string_view extension) const { return absl::EndsWith(path, extension); }

bool TextFile::IsSource() const { return IsHeader() || Is(".cc") || Is(".cu") || Is(".cuh"); }

std::string TextFile::Folder() const {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

std::string TextFile::Name() const { return path.substr(path.rfind('/') + 1); }

const TextFile* Tree::Find(absl::string_view path) const {
  const auto it =
      std::lower_bound(files.begin(), files.end(), path,
                       [](const TextFile& f, absl::string_view p) { return f.path < p; });
  return it != files.end() && it->path == path ? &*it : nullptr;
}

Tree ReadTree(const std::string& root) {
  Tree tree{.root = root};
  if (!fs::exists(root)) return tree;
  for (auto it = fs::recursive_directory_iterator(root); it != fs::recursive_directory_iterator();
       ++it) {
    const std::string path = fs::relative(it->path(), root).generic_string();
    if (LeftOut(path, it->path().filename().string())) {
      if (it->is_directory()) it.disable_recursion_pending();
      continue;
    }
    tree.paths.insert(path);
    if (it->is_regular_file()) ReadOne(it->path(), path, tree);
  }
  std::sort(tree.files.begin(), tree.files.end(),
            [](const TextFile& a, const TextFile& b) { return a.path < b.path; });
  return tree;
}

std::string At(const TextFile& file, size_t line, absl::string_view what) {
  return absl::StrCat(file.path, ":", line, ": ", what);
}

namespace {

// Copies code and blanks the rest; newlines stay.
class Blanker {
 public:
  explicit Blanker(absl::string_view text) : text_(text) {}

  std::string Run() && {
    while (at_ < text_.size()) {
      if (AtDirective()) {
        BlankDirective();
      } else if (absl::StartsWith(Rest(), "//")) {
        BlankUntil("\n", 0);
      } else if (absl::StartsWith(Rest(), "/*")) {
        BlankUntil("*/", 2);
      } else if (absl::StartsWith(Rest(), "R\"")) {
        const size_t open = text_.find('(', at_);
        BlankUntil(absl::StrCat(")", text_.substr(at_ + 2, open - at_ - 2), "\""), 1);
      } else if (text_[at_] == '"' || (text_[at_] == '\'' && !IsDigitSeparator())) {
        BlankLiteral(text_[at_]);
      } else {
        out_ += text_[at_++];
      }
    }
    return std::move(out_);
  }

 private:
  absl::string_view Rest() const { return text_.substr(at_); }

  bool IsDigitSeparator() const {
    return at_ > 0 && std::isxdigit(static_cast<unsigned char>(text_[at_ - 1])) != 0 &&
           at_ + 1 < text_.size() && std::isxdigit(static_cast<unsigned char>(text_[at_ + 1])) != 0;
  }

  bool AtDirective() const {
    if (text_[at_] != '#') return false;
    const size_t line = out_.rfind('\n') == std::string::npos ? 0 : out_.rfind('\n') + 1;
    return out_.find_first_not_of(' ', line) == std::string::npos;
  }

  void Blank() { out_ += text_[at_++] == '\n' ? '\n' : ' '; }

  void BlankDirective() {
    while (at_ < text_.size() && (text_[at_] != '\n' || text_[at_ - 1] == '\\')) Blank();
  }

  void BlankUntil(absl::string_view end, size_t also) {
    size_t stop = text_.find(end, at_ + 1);
    stop = stop == absl::string_view::npos ? text_.size() : stop + (also == 0 ? 0 : end.size());
    while (at_ < stop) Blank();
  }

  void BlankLiteral(char quote) {
    Blank();
    while (at_ < text_.size() && text_[at_] != quote && text_[at_] != '\n') {
      if (text_[at_] == '\\' && at_ + 1 < text_.size()) Blank();
      Blank();
    }
    if (at_ < text_.size() && text_[at_] == quote) Blank();
  }

  const absl::string_view text_;
  size_t at_ = 0;
  std::string out_;
};

}  // namespace

std::string CodeOnly(absl::string_view text) { return Blanker(text).Run(); }

}  // namespace carrel::tidy
