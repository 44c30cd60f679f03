// What:  what a machine's cores can give a model at most: reading all its weights, and its products alone.
//        One JSON object per number of threads.
// Math:  read_ms: every weight byte of a token once, each thread a stretch of its own, the best of some
//        rounds: the floor of a token. products: each thread takes 128 tokens of its own through every
//        product of a layer, layer after layer, and waits for nobody; tokens/s of all layers. loop_us: a
//        loop of the pool with two units of 2 us for each thread, of which 4 us are work; the best of some.
// Usage: cores_bench MODEL THREADS...
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "common/usable_cores.h"
#include "kernels/layer/linear/linear.h"
#include "kernels/layer/quantized_linear/quantized_linear.h"
#include "model/checkpoint.h"
#include "model/digest_cache.h"
#include "model/weights.h"

namespace carrel {
namespace {

constexpr int64_t kTokens = 128;
constexpr absl::Duration kProductsFor = absl::Milliseconds(700);
constexpr int kReadRounds = 12;

struct Stretch {
  const char* data;
  int64_t bytes;
};

Stretch StretchOf(const model::Matrix& w) {
  if (w.blocks) {
    return {static_cast<const char*>(w.blocks->data),
            kernels::GgufBytes(w.blocks->type, w.out * w.in)};
  }
  return {static_cast<const char*>(w.data), w.out * w.in * DTypeBytes(w.dtype)};
}

std::vector<const model::Matrix*> MatricesOf(const model::LayerWeights& w) {
  return {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down};
}

// What a token reads: all but the embedding.
std::vector<Stretch> Stretches(const model::Checkpoint& checkpoint) {
  std::vector<Stretch> all;
  for (Layer layer(0); layer.value() < checkpoint.config.shape.layers; layer = layer.next()) {
    for (const model::Matrix* w : MatricesOf(checkpoint.weights->layer(layer))) {
      all.push_back(StretchOf(*w));
    }
  }
  all.push_back(StretchOf(checkpoint.weights->head()));
  return all;
}

// Of whole words at any address.
uint64_t Sum(const char* data, int64_t bytes) {
  uint64_t parts[8] = {};
  for (int64_t at = 0; at + 64 <= bytes; at += 64) {
    uint64_t words[8];
    __builtin_memcpy(words, data + at, sizeof(words));
    for (int i = 0; i < 8; ++i) parts[i] += words[i];
  }
  uint64_t sum = 0;
  for (const uint64_t part : parts) sum += part;
  return sum;
}

// Seconds from when all threads are there until the last one is done.
double RunOn(int threads, absl::FunctionRef<void(int)> body) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      ++ready;
      while (!go) std::this_thread::yield();
      body(t);
    });
  }
  while (ready < threads) std::this_thread::yield();
  const absl::Time start = absl::Now();
  go = true;
  for (std::thread& thread : all) thread.join();
  return absl::ToDoubleSeconds(absl::Now() - start);
}

// Of all weights, by as many threads; thread t reads the t-th part of every matrix.
double ReadSeconds(const std::vector<Stretch>& stretches, int threads) {
  std::atomic<uint64_t> total{0};
  std::vector<double> rounds(kReadRounds);
  std::atomic<int> arrived{0};
  std::vector<absl::Time> begun(kReadRounds + 1);
  RunOn(threads, [&](int t) {
    uint64_t sum = 0;
    for (int round = 0; round <= kReadRounds; ++round) {
      const int all = (round + 1) * threads;  // the last one stamps the round
      if (arrived.fetch_add(1) == all - 1) begun[static_cast<size_t>(round)] = absl::Now();
      while (arrived < all) {
        if (threads > static_cast<int>(std::thread::hardware_concurrency()))
          std::this_thread::yield();
      }
      if (round == kReadRounds) break;
      for (const Stretch& one : stretches) {
        const int64_t begin = one.bytes * t / threads, end = one.bytes * (t + 1) / threads;
        sum += Sum(one.data + begin, end - begin);
      }
    }
    total += sum;
  });
  double best = 1e9;
  for (int round = 0; round < kReadRounds; ++round) {
    const auto at = static_cast<size_t>(round);
    best = std::min(best, absl::ToDoubleSeconds(begun[at + 1] - begun[at]));
  }
  return total == 0 ? 0 : best;  // this keeps the sums alive
}

// One thread's room for the products of a layer.
class Products {
 public:
  explicit Products(const model::Checkpoint& checkpoint) : checkpoint_(checkpoint) {
    for (Layer layer(0); layer.value() < checkpoint.config.shape.layers; layer = layer.next()) {
      for (const model::Matrix* w : MatricesOf(checkpoint.weights->layer(layer))) {
        Reserve(x_, kTokens * w->in);
        Reserve(y_, kTokens * w->out);
        Reserve(scratch_, w->blocks ? kernels::QuantizedLinearScratchFloats(*w->blocks)
                                    : kernels::LinearScratchFloats(*w));
        if (w->blocks) Reserve(packed_, kernels::PackedTokensFloats(*w->blocks, kTokens));
      }
    }
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = static_cast<float>(i % 17) / 16 - 0.5f;
  }

  void Run(Layer layer) {
    for (const model::Matrix* w : MatricesOf(checkpoint_.weights->layer(layer))) {
      if (w->data == nullptr && !w->blocks) continue;  // experts
      if (!w->blocks) {
        kernels::Linear(x_.data(), kTokens, w->in, *w, y_.data(), w->out, scratch_.data());
        continue;
      }
      const bool packs = kernels::PackedTokensFloats(*w->blocks, kTokens) > 0;
      if (packs) kernels::PackTokens(x_.data(), kTokens, w->in, *w->blocks, packed_.data());
      kernels::QuantizedLinear(x_.data(), kTokens, w->in, *w->blocks, y_.data(), w->out,
                               scratch_.data(), packs ? packed_.data() : nullptr);
    }
  }

 private:
  static void Reserve(std::vector<float>& room, int64_t floats) {
    room.resize(std::max(room.size(), static_cast<size_t>(floats)));
  }

  const model::Checkpoint& checkpoint_;
  std::vector<float> x_, y_, scratch_, packed_;
};

double ProductsTokensPerSecond(const model::Checkpoint& checkpoint, int threads) {
  const int64_t layers = checkpoint.config.shape.layers;
  std::atomic<int64_t> passed{0};
  const double seconds = RunOn(threads, [&](int) {
    Products products(checkpoint);
    const absl::Time end = absl::Now() + kProductsFor;
    for (int64_t i = 0; absl::Now() < end; ++i, ++passed) {
      products.Run(Layer(static_cast<int32_t>(i % layers)));
    }
  });
  return static_cast<double>(passed * kTokens) / seconds / static_cast<double>(layers);
}

double LoopMicroseconds(int threads) {
  constexpr int kRounds = 40, kLoops = 100;
  ThreadPool pool(threads - 1);
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const absl::Time start = absl::Now();
    for (int i = 0; i < kLoops; ++i) {
      pool.ParallelFor(2 * threads, [](int64_t) {
        const absl::Time end = absl::Now() + absl::Microseconds(2);
        while (absl::Now() < end) {
        }
      });
    }
    best = std::min(best, absl::ToDoubleMicroseconds(absl::Now() - start) / kLoops);
  }
  return best;
}

absl::Status Run(const std::string& path, const std::vector<int>& threads) {
  const model::DigestCache cache(model::DigestCache::DefaultFolder());
  ThreadPool pool(UsableCores() - 1);
  ASSIGN_OR_RETURN(const model::Checkpoint checkpoint,
                   model::LoadCheckpoint(path, &pool, "", &cache));
  const std::vector<Stretch> stretches = Stretches(checkpoint);
  int64_t bytes = 0;
  for (const Stretch& one : stretches) bytes += one.bytes;
  for (const int count : threads) {
    const double read = ReadSeconds(stretches, count);
    const nlohmann::json json = {
        {"threads", count},
        {"weight_bytes", bytes},
        {"read_ms", 1000 * read},
        {"read_gb_per_s", static_cast<double>(bytes) / read / 1e9},
        {"products_tokens_per_s", ProductsTokensPerSecond(checkpoint, count)},
        {"loop_us", LoopMicroseconds(count)}};
    std::printf("%s\n", json.dump().c_str());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace carrel

int main(int argc, char** argv) {
  std::vector<int> threads;
  for (int i = 2; i < argc; ++i) threads.push_back(std::atoi(argv[i]));
  if (threads.empty() || *std::min_element(threads.begin(), threads.end()) < 1) {
    std::fprintf(stderr, "usage: cores_bench MODEL THREADS...\n");
    return 2;
  }
  const absl::Status status = carrel::Run(argv[1], threads);
  if (!status.ok()) std::fprintf(stderr, "cores_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
