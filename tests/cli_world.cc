#include "tests/cli_world.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "common/status.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;

// The beginning of registry-512 up to the end of a sentence: enough for a fact and for every index.
constexpr size_t kDocumentBytes = 600;

}  // namespace

std::string DemoModel() { return CARREL_SOURCE_DIR "/models/demo"; }
std::string DemoDocument(const std::string& name) {
  return absl::StrCat(DemoModel(), "/docs/", name, ".txt");
}

void FlipBit(const std::string& path, int64_t byte, int bit) {
  (void)chmod(path.c_str(), 0600);  // what is published is read-only
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0) << path << ": " << std::strerror(errno);
  char value = 0;
  EXPECT_EQ(pread(fd, &value, 1, byte), 1) << path << " at " << byte;
  value = static_cast<char>(value ^ (1 << bit));
  EXPECT_EQ(pwrite(fd, &value, 1, byte), 1) << path << " at " << byte;
  close(fd);
}

ModelCopy::ModelCopy(const std::string& folder) : folder_(folder) {
  fs::create_directories(folder);
  for (const fs::directory_entry& file : fs::directory_iterator(DemoModel())) {
    if (!file.is_regular_file()) continue;
    fs::create_symlink(file.path(), fs::path(folder) / file.path().filename());
  }
}

void ModelCopy::Remove(const std::string& file) { CARREL_CHECK(fs::remove(path(file))); }

void ModelCopy::Replace(const std::string& file, absl::string_view bytes) {
  Remove(file);
  WriteBytes(path(file), bytes);
}

void ModelCopy::EditJson(const std::string& file,
                         const std::function<void(nlohmann::ordered_json&)>& edit) {
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(ReadBytes(path(file)));
  edit(json);
  Replace(file, json.dump(2));
}

void ModelCopy::EditWeights(const std::function<void(TensorFile&)>& edit) {
  const std::string file = "model.safetensors";
  TensorFile weights = TensorFile::Read(path(file));
  edit(weights);
  Remove(file);
  weights.Write(path(file));
}

void StoreTest::SetUp() {
  folder_ = FreshTempDir();
  store_ = path("store");
  const std::string text = ReadBytes(DemoDocument("registry-512"));
  document_ = WriteFile("document.txt", text.substr(0, text.find('.', kDocumentBytes) + 1));
  const Outcome prefill = Carrel(Prefill(kKept, {"--json"}));
  ASSERT_THAT(prefill, Succeeds());
  kept_tokens_ = JsonOf(prefill)["tokens"];
  const Outcome asked = Carrel(Ask(kKept));
  ASSERT_THAT(asked, Succeeds());
  answer_ = asked.out;
  ASSERT_NE(answer_, "\n");
}

std::string StoreTest::WriteFile(const std::string& name, absl::string_view bytes) const {
  WriteBytes(path(name), bytes);
  return path(name);
}

Args StoreTest::Prefill(const std::string& name, const Args& more) const {
  const auto given = [&](const std::string& flag) {
    return std::find(more.begin(), more.end(), flag) != more.end();
  };
  Args args = {"prefill"};
  if (!given("--store")) args = With(args, {"--store", store_});
  if (!name.empty()) args = With(args, {"--name", name});
  if (!given("--model")) args = With(args, {"--model", DemoModel()});
  if (!given("--input") && !given("--tokens")) args = With(args, {"--input", document_});
  return With(args, more);
}

Args StoreTest::Ask(const std::string& name, const Args& more) const {
  const auto given = [&](const std::string& flag) {
    return std::find(more.begin(), more.end(), flag) != more.end();
  };
  Args args = {"ask", "--context", name};
  if (!given("--model")) args = With(args, {"--model", DemoModel()});
  if (!given("--server") && !given("--store")) args = With(args, {"--store", store_});
  if (!given("--top-k")) args = With(args, {"--top-k", "all"});
  if (!given("--prompt-tokens")) args.push_back(kQuestion);
  return With(args, more);
}

Texts StoreTest::Names() const {
  const Outcome listed = Carrel({"ls", "--store", store_, "--json"});
  EXPECT_THAT(listed, Succeeds());
  Texts names;
  const nlohmann::json list = JsonOf(listed);
  for (const auto& context : list["contexts"]) names.push_back(context["name"]);
  return names;
}

void StoreTest::ExpectNothingLost() const {
  EXPECT_EQ(Names(), Texts{kKept});
  const Outcome asked = Carrel(Ask(kKept));
  EXPECT_THAT(asked, Succeeds());
  EXPECT_EQ(asked.out, answer_);
}

Server::Server(const std::string& store, const std::string& address, const Args& more) {
  Command command;
  command.args = With({"serve", "--store", store, "--listen", address}, more);
  command.time_limit = absl::Minutes(10);
  process_ = Process::Start(command);
  const bool ready = WaitUntil([&] {
    return !process_->Running() || Carrel({"ls", "--server", address}).exit_code == 0;
  });
  EXPECT_TRUE(ready && process_->Running())
      << "no server on " << address << ": " << process_->err();
}

nlohmann::json JsonOf(const Outcome& outcome) {
  nlohmann::json json = nlohmann::json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(json.is_object()) << outcome;
  return json.is_object() ? json : nlohmann::json::object();
}

Args With(Args args, const Args& more) {
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

}  // namespace carrel::cli
