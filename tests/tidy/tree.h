// What:   the text files of a source tree, read once, for the rules beside this file.
// Shapes: paths are relative to the root, with '/', and sorted. Lines count from 1.
// Edge:   what is built or hidden is left out: build/, out/, __pycache__/ and names that begin with
//         a dot, but for .ci. Files over 1 MB and those that are not text of a kind that the rules
//         read are known by their path alone.
// Errors: a root that is not there is an empty tree; the tests say that it must not be empty.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carrel::tidy {

struct TextFile {
  std::string path;
  std::string text;
  std::vector<std::string> lines;

  bool Is(absl::string_view extension) const;  // with its dot
  bool IsHeader() const { return Is(".h"); }
  bool IsSource() const;       // C++ or CUDA, headers among them
  std::string Folder() const;  // empty for the root
  std::string Name() const;
};

struct Tree {
  std::string root;
  std::vector<TextFile> files;
  std::set<std::string> paths;  // of every file and folder

  const TextFile* Find(absl::string_view path) const;  // null if there is none
  bool Exists(const std::string& path) const { return paths.contains(path); }
};

Tree ReadTree(const std::string& root);

// "tests/tidy/tree.h:3: what"
std::string At(const TextFile& file, size_t line, absl::string_view what);

// A source's text with the same lines, in which comments, literals and preprocessor directives are
// blanks.
std::string CodeOnly(absl::string_view text);

}  // namespace carrel::tidy
