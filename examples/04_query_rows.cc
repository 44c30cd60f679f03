// What an inference engine of one's own does: for one token's queries of a layer, the partial attention over the
// zone, the best rows' positions, and their keys. Compares the store's attention over all rows with one computed here.
// 04_query_rows STORE NAME CONTENT_ID
#include <carrel/retrieval.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>

namespace {

float Widen(uint16_t bf16) { return std::bit_cast<float>(uint32_t{bf16} << 16); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s STORE NAME CONTENT_ID\n", argv[0]);
    return 2;
  }
  const auto fail = [](const carrel::Status& status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  };
  const auto store = carrel::Store::Open(argv[1]);
  if (!store.ok()) return fail(store.status());
  const auto session = carrel::Session::OpenPinned(*store, argv[2], argv[3]);
  if (!session.ok()) return fail(session.status());
  const carrel::ContextInfo& context = (*session)->context();
  const auto d = static_cast<size_t>(context.head_dim);
  std::vector<float> queries(static_cast<size_t>(context.q_heads) * d);
  std::mt19937 random(1);
  for (float& x : queries) x = std::normal_distribution<float>()(random);

  const auto best = (*session)->Ask(
      {.layer = 0, .queries = queries, .select = carrel::TopK{8}, .want = carrel::Want::kScores});
  if (!best.ok()) return fail(best.status());
  for (const carrel::HeadResult& head : *best) {
    std::printf("KV head %d: best row %lld\n", head.kv_head, static_cast<long long>(head.ids[0]));
  }

  const auto all = (*session)->Ask({.layer = 0, .queries = queries, .select = carrel::All{}});
  if (!all.ok()) return fail(all.status());
  std::vector<int64_t> ids(static_cast<size_t>((*session)->zone_end() - (*session)->zone_begin()));
  std::iota(ids.begin(), ids.end(), (*session)->zone_begin());
  const auto rows = (*session)->Fetch(0, ids);
  if (!rows.ok()) return fail(rows.status());
  double sum = 0;  // of the first q head, which reads the first KV head
  for (size_t i = 0; i < ids.size(); ++i) {
    double score = 0;
    for (size_t j = 0; j < d; ++j) score += queries[j] * Widen(rows->k[i * d + j]);
    sum += std::exp(score / std::sqrt(static_cast<double>(d)));
  }
  std::printf("lse of q head 0: %.4f from the store, %.4f from its rows\n", all->front().lse[0],
              std::log(sum));
  return std::abs(all->front().lse[0] - std::log(sum)) < 1e-3 ? 0 : 1;
}
