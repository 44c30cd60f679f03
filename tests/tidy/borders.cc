// Borders inside the large folders. A room is a set of files; who may include whom stands in one table.
// It was begun with what was true, and is to lose edges, not to gain them.
#include <map>
#include <regex>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

struct Room {
  const char* area;  // folder
  const char* name;
  const char* files;  // without extension, from the area; a '*' at the end is any ending
  const char* may;    // rooms of the same area that it may include
};

constexpr Room kRooms[] = {
    {"decoder", "values", "statistics sampler", ""},
    {"decoder", "methods",
     "select/selector_config select/method_type select/methods select/host_rows zone/zones", ""},
    {"decoder", "options", "config fidelity lab_options", "methods"},
    {"decoder", "client", "client/*", ""},
    {"decoder", "window", "window/*", ""},
    {"decoder", "select", "select/*", "methods"},
    {"decoder", "sources", "sources/*", "client"},
    {"decoder", "shared", "shared", ""},
    {"decoder", "zone", "zone/*", "values methods options client window select shared"},
    {"decoder", "plan", "plan/*", "values methods options client window select zone"},
    {"decoder", "runner", "runner/*",
     "values methods options client window select shared zone sources"},
    {"decoder", "decoder", "decoder generation",
     "values methods options client select zone sources runner plan"},

    {"kvstore/index", "rows", "rows/*", ""},
    {"kvstore/index", "summaries",
     "summaries/summaries summaries/summaries_header "
     "summaries/summary_table summaries/fidelity",
     "rows"},
    {"kvstore/index", "building", "building/*", "rows summaries"},
    {"kvstore/index", "making summaries", "summaries/summaries_build", "rows summaries building"},
    {"kvstore/index", "index",
     "index index_type index_kinds index_spec int8_scan search_util auto_index", "rows"},
    // Every other folder is a kind, and includes no other.
    {"kvstore/index", "a kind", "*", "rows index building"},

    {"model", "files",
     "model_files digest_cache safetensors* gguf gguf_metadata "
     "gguf_writer full_match generation_defaults",
     ""},
    {"model", "config", "config field_rules rope_* gguf_config device", "files"},
    {"model", "tokenizers", "tokenizer/*", "files"},
    {"model", "backends",
     "backend cpu_backend cuda_backend cuda_weights adapter weights gguf_weights non_finite router "
     "scratch_pool transformer",
     "files config"},
    {"model", "checkpoint", "checkpoint fingerprint special_tokens weights_probe",
     "files config tokenizers backends"},

    // Of kernels every operation is a room, and all may include what lies beside the groups ("shared").
    {"kernels", "shared", "", "rows/packed_rows"},
    {"kernels", "select/block_prune", "", "select/chunk_prune"},
    {"kernels", "select/bounded_topk", "", "score/group_score select/topk"},
    {"kernels", "select/chunk_prune", "", "select/topk"},
    {"kernels", "encode/code_encode", "", "score/code_score"},
    {"kernels", "score/block_hamming", "", "score/code_score"},
    {"kernels", "select/hip_select", "", "select/chunk_prune"},
    {"kernels", "select/infinitehip_stage", "", "select/chunk_prune"},
    {"kernels", "select/topk", "", "select/sort_words"},
    {"kernels", "layer/quantized_linear", "", "layer/dequantize layer/linear"},
    {"kernels", "encode/query_drift", "", "layer/rope"},
    {"kernels", "rows/row_bank", "", "rows/packed_rows"},
    {"kernels", "attention/sparse_attention", "",
     "attention/merge_states score/dot_score score/group_score"},
};

// The part of a path below the area, without its extension; empty if it lies elsewhere.
std::string Stem(absl::string_view area, absl::string_view path) {
  if (!absl::ConsumePrefix(&path, area) || !absl::ConsumePrefix(&path, "/")) return "";
  return std::string(path.substr(0, path.rfind('.')));
}

bool IsTestOrBench(absl::string_view path) {
  for (const char* part : {"_test", "test_", "_bench", "bench_", "decode_case"}) {
    if (absl::StrContains(path, part)) return true;
  }
  return false;
}

// The room of a file; the longest pattern wins. Empty if no room has it. Of "*" each folder is a
// room of its own.
std::string RoomOf(const std::string& area, const std::string& stem) {
  if (area == "kernels") {
    const size_t slash = stem.rfind('/');
    return slash == std::string::npos ? "shared" : stem.substr(0, slash);
  }
  std::string found;
  size_t longest = 0;
  for (const Room& room : kRooms) {
    if (room.area != area) continue;
    for (absl::string_view pattern : absl::StrSplit(room.files, ' ')) {
      const bool fits = absl::EndsWith(pattern, "*")
                            ? absl::StartsWith(stem, absl::StripSuffix(pattern, "*"))
                            : stem == pattern;
      if (!fits || pattern.size() < longest) continue;
      longest = pattern.size();
      found = pattern == "*" ? stem.substr(0, stem.find('/')) : room.name;
    }
  }
  return found;
}

bool May(const std::string& area, const std::string& from, const std::string& to) {
  if (from == to || (area == "kernels" && to == "shared")) return true;
  const bool named = std::any_of(std::begin(kRooms), std::end(kRooms), [&](const Room& room) {
    return room.area == area && room.name == from;
  });
  for (const Room& room : kRooms) {
    if (room.area != area || (named ? room.name != from : std::string_view(room.files) != "*"))
      continue;
    for (absl::string_view name : absl::StrSplit(room.may, ' ')) {
      if (name == to) return true;
    }
  }
  return false;
}

void CheckFile(const std::string& area, const TextFile& file, Violations& violations) {
  static const std::regex include("^\\s*#\\s*include \"([^\"]+)\"");
  const std::string stem = Stem(area, file.path), from = RoomOf(area, stem);
  if (from.empty()) {
    violations.push_back(
        At(file, 1, absl::StrCat("no room of ", area, " has it: add it in tests/tidy/borders.cc")));
    return;
  }
  for (size_t i = 0; i < file.lines.size(); ++i) {
    std::smatch match;
    if (!absl::StrContains(file.lines[i], "#include \"") ||
        !std::regex_search(file.lines[i], match, include)) {
      continue;
    }
    const std::string target = Stem(area, match[1].str());
    if (target.empty() || IsTestOrBench(target)) continue;
    const std::string to = RoomOf(area, target);
    if (!May(area, from, to)) {
      violations.push_back(
          At(file, i + 1,
             absl::StrCat(area, ", ", from, " may not include ", to, " (", match[1].str(), ")")));
    }
  }
}

}  // namespace

Violations CheckInnerBorders(const Tree& tree) {
  Violations violations;
  for (const TextFile& file : tree.files) {
    if (!file.IsSource() || IsTestOrBench(file.path)) continue;
    for (const char* area : {"decoder", "kvstore/index", "model", "kernels"}) {
      if (!Stem(area, file.path).empty()) CheckFile(area, file, violations);
    }
  }
  return violations;
}

}  // namespace carrel::tidy
