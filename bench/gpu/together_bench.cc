// What:  sequences that a GPU decodes together, over documents of random rows: tokens a second in all, and how long a
//        step takes, with 1, 8 and 32 sequences on one document and on as many documents, rows in this host's memory
//        or on the device, a few attended or all; and what reloading a document for each would cost at the rate of
//        this bus. One JSON object a line. "as_alone": the first sequence's tokens are those that it gets alone.
// Usage: together_bench MODEL [documents] [--tokens N] [--rows N] [--bank-rows N]... [--warm STEPS] [--least N] [--only WAY]
//        MODEL: of make-model, of any number of layers. documents: each sequence on one of its own, as far as memory
//        goes (--host-gb, --device-gb: of rows), instead of all on one. --bank-rows: also host memory with banks of so
//        many rows per layer and KV head on the device, and the share of rows that was found there. Rows are random, and
//        so are the queries of a model whose tokens are not alike: nothing comes back but by chance. make-model --alike C
//        --added 0.001 --rope-theta 1e30 makes the queries of each layer a walk around one point, as near as C says: with
//        --warm, the steps before those measured, so many that banks are full, C makes rows come back as they do in a text.
//        --least: of sequences. --only: host, bank, device or dense. Defaults: 131000, 512, none, 14, 1, all.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/bf16.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "decoder/decoder.h"
#include "decoder/generation.h"
#include "model/checkpoint.h"
#include "retrieval/session.h"

namespace carrel {
namespace {

using decoder::Generation;

constexpr int64_t kWarmSteps = 14;  // with them the step becomes a graph
constexpr int64_t kSteps = 40;
constexpr int64_t kHeadRows = 4096;  // of a head in one reply

// Numbers to take rows from, anywhere in them.
class RandomNumbers {
 public:
  RandomNumbers() : numbers_(size_t{32} << 20) {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> few(1 << 16);
    for (uint16_t& x : few) x = FloatToBf16(normal(rng));
    for (uint16_t& x : numbers_) x = few[rng() >> 48];
  }
  const uint16_t* Some(uint64_t seed, int64_t count) const {
    std::mt19937_64 rng(seed);
    return &numbers_[rng() % (numbers_.size() - static_cast<size_t>(count))];
  }

 private:
  std::vector<uint16_t> numbers_;
};

// A context of random rows: opens, and gives rows.
class RandomStore final : public retrieval::Session {
 public:
  RandomStore(const RandomNumbers& numbers, const AttentionShape& shape, int64_t tokens, int64_t id)
      : numbers_(numbers), shape_(shape), tokens_(tokens), id_(id) {}

  absl::StatusOr<retrieval::Opened> Open(const retrieval::OpenRequest& open) override {
    retrieval::Opened opened;
    opened.context.content_id = absl::StrCat("random-", id_);
    opened.context.shape = shape_;
    opened.context.tokens = tokens_;
    opened.zone = {open.sink, tokens_ - open.local};
    opened.limits = {.max_top_k = tokens_,
                     .max_query_tokens = 16,
                     .max_fetch_rows = kHeadRows * shape_.kv_heads,
                     .max_result_bytes = int64_t{1} << 30};
    return opened;
  }
  absl::StatusOr<retrieval::RequestId> Send(retrieval::Query) override {
    return absl::UnimplementedError("rows are here alone");
  }
  absl::StatusOr<retrieval::RequestId> Send(retrieval::Fetch fetch) override {
    asked_[++last_] = std::move(fetch);
    return last_;
  }
  absl::StatusOr<retrieval::Part> Next(retrieval::RequestId id) override {
    const retrieval::Fetch fetch = asked_[id];
    const int64_t rows = fetch.range.rows();
    retrieval::Part part;
    part.last = true;
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      retrieval::Piece& piece = part.pieces.emplace_back();
      piece.kv_head = KvHead(head);
      piece.rows = rows;
      uint64_t seed = static_cast<uint64_t>(
          ((id_ * 64 + fetch.layer.value()) * 64 + head) * 1'000'000 + fetch.range.begin);
      for (auto* const to : {&piece.k, &piece.v}) {
        const uint16_t* const some = numbers_.Some(seed++, rows * shape_.head_dim);
        for (int64_t j = 0; j < rows; ++j) to->push_back(some + j * shape_.head_dim);
      }
    }
    asked_.erase(id);
    return part;
  }
  void Forget(retrieval::RequestId id) override { asked_.erase(id); }
  bool broken() const override { return false; }
  int64_t bytes_sent() const override { return 0; }
  int64_t bytes_received() const override { return 0; }

 private:
  const RandomNumbers& numbers_;
  const AttentionShape shape_;
  const int64_t tokens_, id_;
  retrieval::RequestId last_ = 0;
  std::map<retrieval::RequestId, retrieval::Fetch> asked_;
};

struct Flags {
  std::string model;
  bool documents = false;
  int64_t tokens = 131000, rows = 512, host_gb = 80, device_gb = 90, least = 1;
  int64_t warm = kWarmSteps;  // with banks
  std::vector<int64_t> bank_rows;
  std::string only;  // one of the ways; empty: all
};

struct Way {
  const char* name;
  const char* zone;
  bool dense;
  int64_t rows_gb;  // that there is room for
  int64_t bank_rows = 0;
};

class Bench {
 public:
  Bench(const Flags& flags, const model::Checkpoint& checkpoint, ThreadPool* pool)
      : flags_(flags), checkpoint_(checkpoint), pool_(pool) {}

  absl::Status Run() {
    RETURN_IF_ERROR(MeasureBus());
    for (const Way& way : Ways()) {
      if (!flags_.only.empty() && flags_.only != way.name) continue;
      const int64_t most = flags_.documents ? way.rows_gb * 1'000'000'000 / DocumentBytes() : 32;
      // With banks rows are where they were without.
      if (way.bank_rows > 0 && kept_.empty()) kept_ = std::move(decoders_);
      if (way.bank_rows == 0) kept_.clear();
      decoders_.clear();
      for (const int64_t n : {int64_t{1}, int64_t{8}, int64_t{32}}) {
        if (n < flags_.least) continue;
        RETURN_IF_ERROR(Measure(way, std::min(n, most)));
        if (n > most) break;
      }
    }
    return absl::OkStatus();
  }

 private:
  std::vector<Way> Ways() const {
    std::vector<Way> ways = {{"host", "host", false, flags_.host_gb}};
    for (const int64_t rows : flags_.bank_rows) {
      ways.push_back({"bank", "host", false, flags_.host_gb, rows});
    }
    ways.push_back({"device", "device", false, flags_.device_gb});
    ways.push_back({"dense", "device", true, flags_.device_gb});
    return ways;
  }

  int64_t DocumentBytes() const {
    const AttentionShape& shape = checkpoint_.config.shape;
    return int64_t{shape.layers} * shape.kv_heads * shape.head_dim * 2 * 2 * flags_.tokens;
  }

  // Rows, and what finds them.
  int64_t BankBytes(int64_t rows) const {
    const AttentionShape& shape = checkpoint_.config.shape;
    const int64_t row = int64_t{shape.head_dim} * 2 * 2 + 16;
    return int64_t{shape.layers} * shape.kv_heads * (rows * row + flags_.tokens * 4);
  }

  absl::Status MeasureBus() {
    constexpr int64_t kBytes = int64_t{1} << 30;
    ASSIGN_OR_RETURN(auto host, cuda::PinnedBuffer<uint8_t>::Create(kBytes));
    ASSIGN_OR_RETURN(auto device, cuda::DeviceBuffer<uint8_t>::Create(kBytes));
    ASSIGN_OR_RETURN(const auto stream, cuda::Stream::Create());
    std::memset(host.data(), 1, kBytes);
    for (int i = 0; i < 4; ++i) {
      const absl::Time start = absl::Now();
      if (cudaMemcpyAsync(device.data(), host.data(), kBytes, cudaMemcpyHostToDevice,
                          stream.get()) != cudaSuccess)
        return absl::InternalError("a copy failed");
      RETURN_IF_ERROR(stream.Synchronize());
      bus_gb_per_s_ =
          std::max(bus_gb_per_s_, 1e-9 * kBytes / absl::ToDoubleSeconds(absl::Now() - start));
    }
    return absl::OkStatus();
  }

  absl::Status OpenUpTo(const Way& way, int64_t n) {
    decoder::RetrievalConfig config;
    config.sink = 4;
    config.local = 64;
    config.dense_layers = 0;
    config.estimate = decoder::Estimate::kOff;
    const decoder::SelectorConfig method = *decoder::ParseSelector("hash:oversample=1");
    if (way.dense) {
      config.selection = select::All();
    } else {
      config.selection = select::TopK{flags_.rows};
    }
    if (std::strcmp(way.zone, "host") == 0) {
      decoder::BankConfig bank;
      if (way.bank_rows > 0) bank.bytes = BankBytes(way.bank_rows);
      config.zone = decoder::HostZoneOptions{method, bank};
    } else {
      config.zone = decoder::DeviceZoneOptions{method};
    }
    decoder::DeviceConfig device;
    device.device = model::Device::kCuda;
    device.new_tokens = flags_.warm + kSteps + 16;
    for (int64_t i = static_cast<int64_t>(decoders_.size()); i < n; ++i) {
      auto store = std::make_unique<RandomStore>(numbers_, checkpoint_.config.shape, flags_.tokens,
                                                 flags_.documents ? i : 0);
      ASSIGN_OR_RETURN(auto decoder, decoder::Decoder::Open(checkpoint_, std::move(store), "random",
                                                            config, pool_, device));
      decoders_.push_back(std::move(decoder));
    }
    return absl::OkStatus();
  }

  decoder::GenerateOptions Options(int64_t steps) const {
    decoder::GenerateOptions options;
    options.max_tokens = steps + 1;
    options.ignore_eos = true;
    return options;
  }
  static std::vector<TokenId> Prompt(int64_t i) {
    const auto id = static_cast<TokenId>(i);
    return {100 + id, 7 * id + 1, 3, 4};
  }

  // Of all sequences so far, by layer.
  std::vector<decoder::BankStatistics> Banks(int64_t n) const {
    std::vector<decoder::BankStatistics> banks(
        static_cast<size_t>(checkpoint_.config.shape.layers));
    for (int64_t i = 0; i < n; ++i) {
      const std::vector<decoder::LayerStatistics> layers =
          decoders_[static_cast<size_t>(i)]->statistics().layers;
      for (size_t l = 0; l < banks.size(); ++l) {
        banks[l].slots = layers[l].bank.slots;
        banks[l].wanted += layers[l].bank.wanted;
        banks[l].hits += layers[l].bank.hits;
      }
    }
    return banks;
  }

  // The share of the rows that banks held during the steps measured, of all layers and of each.
  void AddFound(nlohmann::json& json) const {
    int64_t wanted = 0, hits = 0;
    nlohmann::json by_layer = nlohmann::json::array();
    const auto share = [](int64_t part, int64_t whole) {
      return static_cast<double>(part) / static_cast<double>(std::max<int64_t>(1, whole));
    };
    for (size_t l = 0; l < after_.size(); ++l) {
      const int64_t of_layer = after_[l].wanted - before_[l].wanted;
      const int64_t found = after_[l].hits - before_[l].hits;
      by_layer.push_back(share(found, of_layer));
      wanted += of_layer;
      hits += found;
    }
    json["bank_rows"] = after_[0].slots;
    json["found_in_bank"] = share(hits, wanted);
    json["found_by_layer"] = std::move(by_layer);
  }

  // Of each step, ms; sorted.
  absl::StatusOr<std::vector<double>> Steps(int64_t n, int64_t warm, std::vector<TokenId>& first) {
    std::vector<Generation> generations;
    for (int64_t i = 0; i < n; ++i) {
      ASSIGN_OR_RETURN(Generation one,
                       Generation::Begin(*decoders_[i], Prompt(i), Options(warm + kSteps)));
      while (one.reading_prompt()) RETURN_IF_ERROR(one.Step());
      generations.push_back(std::move(one));
    }
    std::vector<Generation*> all;
    for (Generation& one : generations) all.push_back(&one);
    std::vector<double> ms;
    for (int64_t step = 0; step < warm + kSteps; ++step) {
      if (step == warm) before_ = Banks(n);
      const absl::Time start = absl::Now();
      for (const absl::Status& status : Generation::Step(all)) RETURN_IF_ERROR(status);
      if (step >= warm) ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
    }
    after_ = Banks(n);
    first = generations[0].TakeResult().ids;
    std::sort(ms.begin(), ms.end());
    return ms;
  }

  absl::Status Measure(const Way& way, int64_t n) {
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(OpenUpTo(way, n));
    const double open_s = absl::ToDoubleSeconds(absl::Now() - start);
    const int64_t warm = way.bank_rows > 0 ? flags_.warm : kWarmSteps;
    std::vector<TokenId> together;
    ASSIGN_OR_RETURN(const std::vector<double> ms, Steps(n, warm, together));
    ASSIGN_OR_RETURN(const decoder::GenerateResult alone,
                     decoders_[0]->Generate(Prompt(0), Options(warm + kSteps)));
    ASSIGN_OR_RETURN(const decoder::GenerateResult last,
                     decoders_[n - 1]->Generate(Prompt(n - 1), Options(warm + kSteps)));
    const double median = ms[ms.size() / 2];
    nlohmann::json json = {
        {"zone", way.zone},
        {"rows", way.dense ? nlohmann::json("all") : nlohmann::json(flags_.rows)},
        {"tokens", flags_.tokens},
        {"layers", checkpoint_.config.shape.layers},
        {"sequences", n},
        {"documents", flags_.documents ? n : 1},
        {"ms_per_step", median},
        {"p10", ms[ms.size() / 10]},
        {"p90", ms[ms.size() * 9 / 10]},
        {"tokens_per_s", 1000 * static_cast<double>(n) / median},
        {"as_alone", together == alone.ids},
        {"first_alone_ms", 1000 * alone.generate_seconds / static_cast<double>(alone.steps)},
        {"last_alone_ms", 1000 * last.generate_seconds / static_cast<double>(last.steps)},
        {"open_s", open_s}};
    if (way.bank_rows > 0) AddFound(json);
    if (way.dense && n == 1) {
      // Documents in turn: before an answer of so many tokens its document comes over the bus.
      const double reload_ms = 1e-6 * static_cast<double>(DocumentBytes()) / bus_gb_per_s_;
      json["bus_gb_per_s"] = bus_gb_per_s_;
      json["reload_ms"] = reload_ms;
      for (const int answer : {1, 64, 256}) {
        json[absl::StrCat("reloading_every_", answer, "_tokens_per_s")] =
            1000.0 * answer / (reload_ms + answer * median);
      }
    }
    std::printf("%s\n", json.dump().c_str());
    std::fflush(stdout);
    return absl::OkStatus();
  }

  const Flags flags_;
  const model::Checkpoint& checkpoint_;
  ThreadPool* const pool_;
  const RandomNumbers numbers_;
  double bus_gb_per_s_ = 0;
  std::vector<decoder::BankStatistics> before_, after_;  // the steps measured
  std::vector<std::unique_ptr<decoder::Decoder>> decoders_;
  std::vector<std::unique_ptr<decoder::Decoder>> kept_;  // for the rows that they share
};

absl::Status Run(const Flags& flags) {
  ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()) - 1);
  ASSIGN_OR_RETURN(const model::Checkpoint checkpoint, model::LoadCheckpoint(flags.model, &pool));
  return Bench(flags, checkpoint, &pool).Run();
}

}  // namespace
}  // namespace carrel

int main(int argc, char** argv) {
  carrel::Flags flags;
  const std::map<std::string, int64_t*> numbers = {
      {"--tokens", &flags.tokens},       {"--rows", &flags.rows}, {"--host-gb", &flags.host_gb},
      {"--device-gb", &flags.device_gb}, {"--warm", &flags.warm}, {"--least", &flags.least}};
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const auto number = numbers.find(arg);
    if (number != numbers.end() && i + 1 < argc) {
      *number->second = std::strtol(argv[++i], nullptr, 10);
    } else if (arg == "--bank-rows" && i + 1 < argc) {
      flags.bank_rows.push_back(std::strtol(argv[++i], nullptr, 10));
    } else if (arg == "--only" && i + 1 < argc) {
      flags.only = argv[++i];
    } else if (arg == "documents") {
      flags.documents = true;
    } else if (flags.model.empty() && arg[0] != '-') {
      flags.model = arg;
    } else {
      flags.model.clear();
      break;
    }
  }
  if (flags.model.empty() || flags.tokens < 1024 || flags.rows < 1 ||
      flags.warm < carrel::kWarmSteps) {
    std::fprintf(stderr,
                 "usage: together_bench MODEL [documents] [--tokens N] [--rows N] [--host-gb N] "
                 "[--device-gb N] [--bank-rows N]... [--least SEQUENCES] [--warm STEPS] [--only "
                 "host|bank|device|dense]\n");
    return 2;
  }
  const absl::Status status = carrel::Run(flags);
  if (!status.ok()) std::fprintf(stderr, "together_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
