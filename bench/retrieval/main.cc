// retrieval_bench: every index kind and its peers on the same queries. README.md beside it
// explains.
#include <cblas.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/retrieval/case.h"
#include "bench/retrieval/cold.h"
#include "bench/retrieval/contexts.h"
#include "bench/retrieval/engine.h"
#include "bench/retrieval/measure.h"
#include "bench/retrieval/method.h"
#include "common/status.h"
#include "common/usable_cores.h"

extern "C" void openblas_set_num_threads(int threads);

namespace carrel::bench {
namespace {

constexpr char kScratch[] = "build/bench/retrieval";

constexpr char kUsage[] =
    R"(usage: retrieval_bench [--quick] [options]     (./run bench retrieval ...)
  --quick             8k and 32k tokens of the demo model only, few heads: within a minute once made
  --store DIR         measure contexts of this store ...
  --context NAME      ... of this name (repeatable) instead of the default ones
  --synthetic TOKENS  also a synthetic context of the 8B shape (repeatable; default without
                      --quick and --context: 131072 and 1048576)
  --layers N          layers that synthetic contexts are made with (4; 1 above 256k tokens)
  --as-layers N       times are scaled to so many layers (synthetic: 32; others: their own)
  --top-k N           rows per KV head (repeatable; 128, and 512 without --quick)
  --kind NAME         only this kind or peer, or "engine" (repeatable); "codes": codes of every width,
                      training and scan, as code-128-hata-symmetric
  --effort N          of the engine's queries; 0: the index's own
  --heads N           KV heads measured per context (default: as --keys allows)
  --keys N            keys measured per context in sum (262144; quick: 131072)
  --queries N         queries per head, held out of what indexes are built from (16)
  --threads N         (one per core)
  --slow              graphs also above 256k tokens
  --no-peers          --no-engine     --docs DIR (of registry-*.txt)
)";

struct Flags {
  int32_t effort = 0;  // of the engine's queries
  bool quick = false, slow = false, peers = true, engine = true;
  std::string store, docs = "models/demo/docs";
  std::vector<std::string> contexts, kinds;
  std::vector<int64_t> synthetic, top_ks;
  int64_t layers = 0, as_layers = 0, heads = 0, keys = 0, queries = 16, threads = 0;
};

absl::StatusOr<Flags> Parse(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto is = [&](const char* name) { return flag == name; };
    if (is("--quick"))
      flags.quick = true;
    else if (is("--slow"))
      flags.slow = true;
    else if (is("--no-peers"))
      flags.peers = false;
    else if (is("--no-engine"))
      flags.engine = false;
    else {
      if (i + 1 == argc) return absl::InvalidArgumentError(flag + ": unknown, or lacks a value");
      const std::string value = argv[++i];
      if (is("--store"))
        flags.store = value;
      else if (is("--docs"))
        flags.docs = value;
      else if (is("--context"))
        flags.contexts.push_back(value);
      else if (is("--kind"))
        flags.kinds.push_back(value);
      else {
        int64_t number = 0;
        if (!absl::SimpleAtoi(value, &number) || number < 1) {
          return absl::InvalidArgumentError(
              absl::StrCat(flag, " ", value, ": unknown, or no number"));
        }
        if (is("--synthetic"))
          flags.synthetic.push_back(number);
        else if (is("--top-k"))
          flags.top_ks.push_back(number);
        else if (is("--layers"))
          flags.layers = number;
        else if (is("--as-layers"))
          flags.as_layers = number;
        else if (is("--heads"))
          flags.heads = number;
        else if (is("--keys"))
          flags.keys = number;
        else if (is("--effort"))
          flags.effort = static_cast<int32_t>(number);
        else if (is("--queries"))
          flags.queries = number;
        else if (is("--threads"))
          flags.threads = number;
        else
          return absl::InvalidArgumentError(flag + ": unknown");
      }
    }
  }
  if (!flags.contexts.empty() && flags.store.empty()) {
    return absl::InvalidArgumentError("--context needs --store");
  }
  if (flags.synthetic.empty() && !flags.quick && flags.contexts.empty()) {
    flags.synthetic = {131072, 1048576};
  }
  if (flags.top_ks.empty()) {
    flags.top_ks = flags.quick ? std::vector<int64_t>{128} : std::vector<int64_t>{128, 512};
  }
  if (flags.keys == 0) flags.keys = flags.quick ? 131072 : 262144;
  if (flags.threads == 0) flags.threads = UsableCores();
  return flags;
}

std::vector<WantedContext> Wanted(const Flags& flags) {
  std::vector<WantedContext> wanted;
  const std::string own = absl::StrCat(kScratch, "/store");
  const auto as_layers = static_cast<int32_t>(flags.as_layers);
  for (const std::string& name : flags.contexts) {
    wanted.push_back({.store_folder = flags.store, .name = name, .as_layers = as_layers});
  }
  if (flags.contexts.empty() || !flags.synthetic.empty()) {
    wanted.push_back({.store_folder = own, .name = "registry-8k", .demo = true, .own = true});
  }
  if (flags.contexts.empty()) {
    const bool have = HaveDocument(flags.docs, "registry-32k");
    if (!have) {
      std::fprintf(
          stderr,
          "retrieval: registry-32k.txt is not here (CARREL_SHARED): a synthetic context of "
          "its length stands in\n");
    }
    wanted.push_back({.store_folder = own,
                      .name = have ? "registry-32k" : "like-registry-32k",
                      .demo = have,
                      .tokens = 30883,
                      .own = true});
  }
  for (const int64_t tokens : flags.synthetic) {
    const auto layers = static_cast<int32_t>(flags.layers > 0  ? flags.layers
                                             : tokens > 262144 ? 1
                                                               : 4);
    wanted.push_back({.store_folder = own,
                      .name = absl::StrCat("synthetic-", tokens / 1024, "k-x", layers),
                      .as_layers = as_layers > 0 ? as_layers : 32,
                      .tokens = tokens,
                      .layers = layers,
                      .own = true});
  }
  return wanted;
}

class Bench {
 public:
  explicit Bench(const Flags& flags) : flags_(flags), pool_(static_cast<int>(flags.threads) - 1) {}

  absl::Status Run() {
    openblas_set_num_threads(1);  // heads are spread over the threads
    const absl::Time start = absl::Now();
    const std::vector<WantedContext> contexts = Wanted(flags_);
    for (const WantedContext& wanted : contexts) {
      RETURN_IF_ERROR(MakeIfAbsent(wanted, flags_.docs, pool_));
    }
    std::fprintf(stderr, "retrieval: contexts at hand after %.1f s\n",
                 absl::ToDoubleSeconds(absl::Now() - start));
    const absl::Time measured = absl::Now();
    for (const WantedContext& wanted : contexts) {
      const absl::Status status = MeasureContext(wanted);
      if (!status.ok()) return Annotate(status, wanted.name);
    }
    PrintTable(all_);
    std::string load;
    std::ifstream("/proc/loadavg") >> load;
    std::fprintf(stderr, "measured in %.1f s, load %s\n",
                 absl::ToDoubleSeconds(absl::Now() - measured), load.c_str());
    return failed_;
  }

 private:
  std::vector<MethodKind> Kinds() const {
    std::vector<MethodKind> kinds = OurKinds();
    if (flags_.peers) {
      for (auto* peers : {FaissPeers, HnswlibPeers, ExactPeers}) {
        for (MethodKind& kind : peers()) kinds.push_back(std::move(kind));
      }
    }
    const auto named = [&](absl::string_view name) {
      return std::find(flags_.kinds.begin(), flags_.kinds.end(), name) != flags_.kinds.end();
    };
    std::erase_if(kinds, [&](const MethodKind& kind) {
      if (kind.only_if_named) return !named(kind.name) && !named("codes");
      return !flags_.kinds.empty() && !named(kind.name);
    });
    return kinds;
  }

  absl::Status MeasureContext(const WantedContext& wanted) {
    std::vector<Result> results;
    std::vector<std::pair<MethodKind, std::string>> cold_kinds;  // and the name of the blobs
    ColdCase cold;
    {
      ASSIGN_OR_RETURN(const auto store,
                       kvstore::Store::Open(wanted.store_folder, kvstore::StoreMode::kReadOnly));
      ASSIGN_OR_RETURN(const Case c, Open(*store, wanted));
      cold = MakeCold(c, wanted.store_folder);
      for (const MethodKind& kind : Kinds())
        RETURN_IF_ERROR(MeasureKind(c, cold, kind, results, cold_kinds));
    }
    // Every mapping is closed now: pages can be dropped.
    for (const auto& [kind, blobs] : cold_kinds) {
      ASSIGN_OR_RETURN(const ColdResult first, MeasureCold(cold, kScratch, blobs, *kind.params,
                                                           flags_.top_ks.front(), pool_));
      for (Result& result : results) {
        if (result.kind != kind.name || result.top_k == 0) continue;
        result.cold_ms = first.ms;
        result.cold_resident = first.resident;
      }
    }
    const bool asked =
        std::find(flags_.kinds.begin(), flags_.kinds.end(), "engine") != flags_.kinds.end();
    if (asked || (flags_.engine && flags_.kinds.empty())) {
      for (const int64_t top_k : flags_.top_ks) {
        ASSIGN_OR_RETURN(Result result,
                         MeasureEngine({.store_folder = wanted.store_folder,
                                        .name = wanted.name,
                                        .as_layers = wanted.as_layers,
                                        .top_k = top_k,
                                        .effort = flags_.effort,
                                        .threads = static_cast<int>(flags_.threads)}));
        results.push_back(std::move(result));
      }
    }
    for (const Result& result : results) PrintJson(result);
    all_.insert(all_.end(), results.begin(), results.end());
    return absl::OkStatus();
  }

  absl::StatusOr<Case> Open(const kvstore::Store& store, const WantedContext& wanted) {
    CaseConfig config{.heads = flags_.heads,
                      .queries = flags_.queries,
                      .max_top_k = *std::max_element(flags_.top_ks.begin(), flags_.top_ks.end()),
                      .as_layers = wanted.as_layers};
    if (config.heads == 0) {
      ASSIGN_OR_RETURN(const int64_t tokens, TokensOf(store, wanted.name));
      config.heads = std::clamp<int64_t>(flags_.keys / tokens, 1, flags_.quick ? 8 : 16);
    }
    return OpenCase(store, wanted.name, config, pool_);
  }

  absl::Status MeasureKind(const Case& c, const ColdCase& cold, const MethodKind& kind,
                           std::vector<Result>& results,
                           std::vector<std::pair<MethodKind, std::string>>& cold_kinds) {
    const auto skip = [&](const std::string& why) {
      Result result;
      result.context = c.name;
      result.tokens = c.tokens;
      result.synthetic = c.synthetic;
      result.kind = kind.name;
      result.peer = kind.peer;
      result.note = "skipped: " + why;
      results.push_back(std::move(result));
    };
    if (kind.slow_build && !flags_.slow && c.tokens > 262144) {
      skip("building takes minutes at this length (--slow)");
      return absl::OkStatus();
    }
    std::fprintf(stderr, "retrieval: %s: %s\n", c.name.c_str(), kind.name.c_str());
    const MeasureConfig config{.top_ks = flags_.top_ks,
                               .threads = static_cast<int>(flags_.threads),
                               .samples = flags_.quick ? 32 : 64,
                               .seconds = flags_.quick ? 0.2 : 2.0};
    absl::StatusOr<Measured> measured = Measure(c, kind, config, pool_);
    if (absl::IsUnimplemented(measured.status())) {
      skip(std::string(measured.status().message()));
      return absl::OkStatus();
    }
    if (!measured.ok()) {  // the others are measured all the same
      skip(measured.status().ToString());
      results.back().note = "failed: " + measured.status().ToString();
      failed_ = Annotate(measured.status(), absl::StrCat(c.name, ": ", kind.name));
      return absl::OkStatus();
    }
    if (kind.params.has_value()) {
      const std::string name = absl::StrCat(c.name, "-", kind.name);
      if (kind.params->kind != kvstore::IndexKind::kFlat) {
        RETURN_IF_ERROR(StoreBlobs(cold, kScratch, name, measured->blobs));
      }
      cold_kinds.emplace_back(kind, name);
    }
    results.insert(results.end(), measured->results.begin(), measured->results.end());
    return absl::OkStatus();
  }

  const Flags& flags_;
  ThreadPool pool_;
  std::vector<Result> all_;
  absl::Status failed_;  // of a kind
};

int Main(int argc, char** argv) {
  if (argc > 1 && (std::strcmp(argv[1], "--help") == 0 || std::strcmp(argv[1], "-h") == 0)) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  const absl::StatusOr<Flags> flags = Parse(argc, argv);
  if (!flags.ok()) {
    std::fprintf(stderr, "retrieval_bench: %s\n%s", std::string(flags.status().message()).c_str(),
                 kUsage);
    return 2;
  }
  const absl::Status status = Bench(*flags).Run();
  if (!status.ok()) std::fprintf(stderr, "retrieval_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace carrel::bench

int main(int argc, char** argv) { return carrel::bench::Main(argc, argv); }
