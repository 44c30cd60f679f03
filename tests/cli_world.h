// What: what the tests of the program share: copies of the demo model to damage, a store with one
//       context that must survive whatever a test does to it, servers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/test_util.h"
#include "nlohmann/json.hpp"
#include "tests/cli.h"
#include "tests/tensor_file.h"

namespace carrel::cli {

std::string DemoModel();                            // models/demo
std::string DemoDocument(const std::string& name);  // the path of models/demo/docs/NAME.txt

void FlipBit(const std::string& path, int64_t byte, int bit);

// A copy of the demo model in `folder`; files that nobody changes are links.
class ModelCopy {
 public:
  explicit ModelCopy(const std::string& folder);
  const std::string& folder() const { return folder_; }
  std::string path(const std::string& file) const { return folder_ + "/" + file; }
  // Both replace the link by a file of the copy's own.
  void EditJson(const std::string& file, const std::function<void(nlohmann::ordered_json&)>& edit);
  void EditWeights(const std::function<void(TensorFile&)>& edit);
  void Replace(const std::string& file, absl::string_view bytes);
  void Remove(const std::string& file);

 private:
  const std::string folder_;
};

// Each test's own folder with a store in it that holds one small context, "kept".
class StoreTest : public testing::Test {
 protected:
  static constexpr char kKept[] = "kept";

  void SetUp() override;

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::string WriteFile(const std::string& name, absl::string_view bytes) const;

  // prefill of DEMO and the document into the store, unless `more` names others; an empty name
  // leaves the flag out.
  Args Prefill(const std::string& name, const Args& more = {}) const;
  // ask --model DEMO --context NAME, of the store, attending to all rows unless told otherwise.
  Args Ask(const std::string& name, const Args& more = {}) const;
  Texts Names() const;  // what ls shows
  // Only "kept" is there, and it answers as it did in the beginning.
  void ExpectNothingLost() const;

  std::string folder_;
  std::string store_;
  std::string document_;  // the path of the text of "kept"
  std::string answer_;    // of "kept" to the question
  int64_t kept_tokens_ = 0;
};

// The question of Ask(): its answer is in the document.
inline constexpr char kQuestion[] =
    "\n\nQuestion: What is the badge number of Miathlio Ceatiabu?\nAnswer:";

// A kvstore process that answers.
class Server {
 public:
  Server(const std::string& store, const std::string& address, const Args& more = {});
  Process& process() { return *process_; }

 private:
  std::unique_ptr<Process> process_;
};

// The one JSON object on standard output; fails the test if that is not what stands there.
nlohmann::json JsonOf(const Outcome& outcome);

Args With(Args args, const Args& more);

}  // namespace carrel::cli
