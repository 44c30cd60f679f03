// Includes go one way (docs/architecture.md, "Folders"), and third-party types stay behind their
// fences. Reads every source file.
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>

#include "common/test_util.h"

namespace carrel {
namespace {

namespace fs = std::filesystem;

struct Include {
  std::string file;  // path from the root
  int line = 0;
  std::string target;  // what stands between the quotes or brackets
};

const std::vector<std::string>& Folders() {
  static const std::vector<std::string> folders = {
      "common",  "kernels", "model",   "retrieval", "prefill", "synth",
      "kvstore", "audit",   "decoder", "library",   "serving", "http_api",
      "eval",    "lab",     "tools",   "tests",     "bench"};
  return folders;
}

std::vector<Include> AllIncludes() {
  std::vector<Include> includes;
  const std::regex pattern("^\\s*#\\s*include\\s*[<\"]([^>\"]+)[>\"]");
  for (const std::string& folder : Folders()) {
    const fs::path root = fs::path(CARREL_SOURCE_DIR) / folder;
    if (!fs::exists(root)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".h" && extension != ".cc" && extension != ".cu" && extension != ".cuh")
        continue;
      std::ifstream file(entry.path());
      std::string line;
      for (int number = 1; std::getline(file, line); ++number) {
        std::smatch match;
        if (!std::regex_search(line, match, pattern)) continue;
        includes.push_back(
            {fs::relative(entry.path(), CARREL_SOURCE_DIR).string(), number, match[1].str()});
      }
    }
  }
  return includes;
}

// "kvstore/index" for kvstore's parts, "serving/jobs", "library/api", the top folder otherwise; "proto" for generated headers;
// empty for what is not ours.
std::string Room(const std::string& path) {
  if (path.rfind("carrel/v1/", 0) == 0) return "proto";
  const size_t slash = path.find('/');
  if (slash == std::string::npos) return "";
  const std::string top = path.substr(0, slash);
  if (std::find(Folders().begin(), Folders().end(), top) == Folders().end()) return "";
  for (const std::string part : {"serving/jobs", "library/api"}) {
    if (path.rfind(part + "/", 0) == 0) return part;
  }
  if (top != "kvstore") return top;
  return path.substr(0, path.find('/', slash + 1));
}

// By folder, those that it may include. What is outside knows the lab by its lists alone (.def files), and by headers
// of its own that the lab defines.
using FoldersByFolder = std::map<std::string, std::set<std::string>>;
const FoldersByFolder kAllowed = {
    {"common", {}},
    {"kernels", {"common"}},
    {"retrieval", {"common"}},
    {"model", {"kernels", "common"}},
    {"prefill",
     {"model", "kernels", "common", "kvstore/format", "kvstore/index", "kvstore/storage", "proto"}},
    {"synth", {"common", "prefill", "kvstore/format", "kvstore/index", "kvstore/storage", "proto"}},
    {"kvstore/format", {"common", "proto"}},
    {"kvstore/storage", {"kvstore/format", "common", "proto"}},
    {"kvstore/index",
     {"kvstore/storage", "kvstore/format", "retrieval", "kernels", "common", "proto"}},
    {"kvstore/engine",
     {"kvstore/index", "kvstore/storage", "kvstore/format", "retrieval", "kernels", "common",
      "proto"}},
    {"kvstore/access", {"common"}},
    {"kvstore/service",
     {"kvstore/access", "kvstore/engine", "kvstore/storage", "kvstore/format", "common", "proto"}},
    {"kvstore/remote", {"kvstore/storage", "kvstore/format", "common", "proto"}},
    {"kvstore/replica",
     {"kvstore/engine", "kvstore/remote", "kvstore/service", "kvstore/storage", "kvstore/format",
      "common", "proto"}},
    {"eval", {"serving", "library", "audit", "synth", "model", "common"}},
    {"lab",
     {"decoder", "prefill", "model", "kernels", "common", "kvstore/index", "kvstore/format"}},
    {"audit", {"kvstore/index", "kvstore/storage", "kvstore/format", "kernels", "common", "proto"}},
    {"decoder", {"retrieval", "model", "kernels", "common", "proto"}},
    {"library",
     {"retrieval", "model", "kernels", "common", "prefill", "kvstore/format", "kvstore/storage",
      "kvstore/index", "kvstore/engine", "kvstore/access", "kvstore/service", "decoder", "proto"}},
    {"serving/jobs",
     {"prefill", "model", "common", "kvstore/format", "kvstore/storage", "kvstore/remote",
      "proto"}},
    {"serving",
     {"serving/jobs", "library", "decoder", "retrieval", "model", "common", "kvstore/access",
      "kvstore/format", "kvstore/service", "kvstore/remote", "proto"}},
    {"library/api", {"serving", "library", "decoder", "model", "common"}},
    {"http_api",
     {"serving", "library", "common", "kvstore/access", "kvstore/format", "kvstore/service",
      "proto"}},
    {"tools",
     {"http_api",
      "eval",
      "serving",
      "serving/jobs",
      "library",
      "model",
      "kernels",
      "common",
      "prefill",
      "synth",
      "audit",
      "kvstore/format",
      "kvstore/storage",
      "kvstore/index",
      "kvstore/engine",
      "kvstore/access",
      "kvstore/service",
      "kvstore/remote",
      "kvstore/replica",
      "decoder",
      "proto"}},
};

TEST(IncludeRulesTest, EveryInclude_GoesAnAllowedWay) {
  const auto& allowed = kAllowed;
  int checked = 0;
  for (const Include& include : AllIncludes()) {
    const std::string from = Room(include.file), to = Room(include.target);
    if (to.empty() || to == from) continue;
    if ((from == "tests" || from == "bench") && to != "lab") continue;
    const auto rule = allowed.find(from);
    if (to == "lab") {
      ADD_FAILURE() << include.file << ":" << include.line << ": nothing outside includes the lab";
      continue;
    }
    ASSERT_NE(rule, allowed.end()) << include.file << ": no rule for folder " << from;
    EXPECT_TRUE(rule->second.contains(to)) << include.file << ":" << include.line << ": " << from
                                           << " may not include " << include.target;
    ++checked;
  }
  EXPECT_GT(checked, 200) << "the scan does not see the tree";
}

// A program outside needs the standard library and nothing else.
TEST(IncludeRulesTest, PublicHeaders_IncludeOneAnotherAndTheStandardLibrary) {
  const std::regex pattern("^\\s*#\\s*include\\s*([<\"])([^>\"]+)[>\"]");
  int headers = 0;
  const fs::path root = fs::path(CARREL_SOURCE_DIR) / "include/carrel";
  for (const fs::directory_entry& entry : fs::directory_iterator(root)) {
    ++headers;
    std::ifstream file(entry.path());
    std::string line;
    while (std::getline(file, line)) {
      std::smatch match;
      if (!std::regex_search(line, match, pattern)) continue;
      const std::string target = match[2].str();
      const bool ours = target.starts_with("carrel/") && fs::exists(root / target.substr(7));
      const bool standard = match[1].str() == "<" && (target.find('/') == std::string::npos);
      EXPECT_TRUE(ours || standard) << entry.path() << " includes " << target;
    }
  }
  EXPECT_GE(headers, 10);
}

TEST(IncludeRulesTest, ThirdPartyTypes_StayBehindTheirFences) {
  struct Fence {
    const char* what;
    std::regex target;
    std::regex where;  // files that may
  };
  const std::vector<Fence> fences = {
      {"Faiss", std::regex("^faiss/"), std::regex("^(kvstore/index/|lab/kinds/|bench/).*\\.cc$")},
      {"RocksDB", std::regex("^rocksdb/"), std::regex("^kvstore/storage/(.*\\.cc|rocks\\.h)$")},
      {"gRPC", std::regex("^grpc|\\.grpc\\.pb\\.h$"),
       std::regex("^(kvstore/service/|decoder/client/store_client|decoder/client/"
                  "stalling_store|library/"
                  "(store_access|remote_store)\\.cc|tests/)")},
      {"Protobuf in a header", std::regex("\\.pb\\.h$|^google/protobuf"),
       std::regex(
           "\\.cc$|^kvstore/service/|^kvstore/engine/|^kvstore/storage/|_test_util\\.h$|^tests/")},
      {"OpenBLAS", std::regex("cblas|openblas"), std::regex("^kernels/.*\\.cc$|^bench/")},
      {"PCRE2, SentencePiece, utf8proc", std::regex("^(pcre2|sentencepiece|utf8proc)"),
       std::regex("^model/.*\\.cc$")},
      {"JSON", std::regex("^nlohmann/json\\.hpp$"), std::regex("\\.cc$|^tests/")},
      {"CLI11", std::regex("^CLI/"), std::regex("^tools/.*\\.cc$")},
      {"OpenSSL", std::regex("^openssl/"), std::regex("^common/.*\\.cc$")},
      {"libcurl", std::regex("^curl/"), std::regex("^kvstore/remote/http_client\\.cc$")},
      {"libnats", std::regex("^nats"), std::regex("^serving/jobs/nats_doorbell\\.cc$")},
      {"Expat", std::regex("^expat"), std::regex("^kvstore/remote/xml\\.cc$")},
      {"Prometheus", std::regex("^prometheus/"), std::regex("^kvstore/service/metrics_text\\.cc$")},
      {"Boost", std::regex("^boost/"),
       std::regex("^(kvstore/service/metrics_listener\\.cc|http_api/"
                  "http_(server\\.cc|connection\\.(h|cc)|test_util\\.h)|http_api/"
                  "api_client(_test)?\\.cc|tests/api_partner_test\\.cc)$")},
      {"CUDA", std::regex("^cuda"), std::regex("\\.cuh?$|^common/cuda/")},
      {"cuBLAS, cuDNN", std::regex("^(cublas|cudnn)"),
       std::regex("\\.cuh?$|^kernels/.*\\.cc$|^bench/gpu/.*\\.cc$")},
  };
  for (const Include& include : AllIncludes()) {
    for (const Fence& fence : fences) {
      if (!std::regex_search(include.target, fence.target)) continue;
      EXPECT_TRUE(std::regex_search(include.file, fence.where))
          << include.file << ":" << include.line << ": " << fence.what << " is fenced off here";
    }
  }
}

}  // namespace
}  // namespace carrel
