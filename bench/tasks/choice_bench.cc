// What:  what each method's choice of rows is worth on the same queries: those of dense decoding's answers to a file
//        of questions. Per method, number of rows and layer, means over tokens: the share of the rows with the largest
//        exact group scores that it found (recall, of as many rows), the share of the whole softmax that its rows carry
//        together with sink, local and what is new (mass), and ||out - dense|| / ||dense|| of the layer's attention
//        (error). A JSON line each; a line without a layer has the means over layers.
//        Beside the methods: `term`, exact with the estimation term, and `balanced`, the same with as many rows per KV
//        head as the context's plan gives them at balanced fidelity.
// Usage: choice_bench MODEL STORE CONTEXT QUESTIONS ROWS[,ROWS..] METHOD...      questions as carrel eval reads them
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "decoder/client/wire.h"
#include "decoder/decoder.h"
#include "decoder/fidelity.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/row_selector.h"
#include "eval/questions.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kvstore/storage/store.h"
#include "library/document_ends.h"
#include "library/mapped_rows.h"
#include "library/open_decoder.h"
#include "model/tokenizer/seam.h"

namespace carrel {
namespace {

constexpr int64_t kSink = 4, kLocal = 64, kMaxTokens = 24;

using decoder::HostRows;
using decoder::SelectedRows;

// A choice that is judged.
struct Candidate {
  std::string name;
  int64_t rows = 0;           // per KV head; 0: of the plan
  std::vector<int64_t> plan;  // [layers, kv_heads]
  bool term = false;          // what is not chosen counts through summaries
  std::unique_ptr<decoder::RowSelector> selector;
  std::vector<decoder::Mean> recall, mass, error, attended;  // [layers]
};

// Softmax over parts of the rows, before it is divided.
struct Sum {
  explicit Sum(int64_t head_dim) : out(static_cast<size_t>(head_dim)) {}
  void Add(double weight, const float* v) {
    total += weight;
    for (size_t c = 0; c < out.size(); ++c) out[c] += weight * v[c];
  }
  double total = 0;
  std::vector<double> out;
};

class Judge {
 public:
  Judge(const AttentionShape& shape, RowRange zone, const HostRows& rows, ThreadPool* pool,
        std::vector<Candidate> candidates)
      : shape_(shape),
        zone_(zone),
        rows_(rows),
        pool_(pool),
        candidates_(std::move(candidates)),
        new_k_(static_cast<size_t>(shape.layers)),
        new_v_(new_k_.size()) {}

  // give_up: of the document's last rows, which the question says in another way.
  void StartQuestion(int64_t give_up) {
    document_end_ = rows_.tokens() - give_up;
    for (auto& k : new_k_) k.clear();
    for (auto& v : new_v_) v.clear();
    for (Candidate& candidate : candidates_) candidate.selector->StartSequence();
    step_ = 0;
  }

  // A block of tokens has passed a layer, all rows attended.
  void See(const model::AttentionInput& input) {
    const auto layer = static_cast<size_t>(input.layer.value());
    const int64_t width = int64_t{shape_.kv_heads} * shape_.head_dim;
    new_k_[layer].insert(new_k_[layer].end(), input.k, input.k + input.n * width);
    new_v_[layer].insert(new_v_[layer].end(), input.v, input.v + input.n * width);
    if (input.n != 1) return;  // of a prompt
    JudgeLayer(input.layer, input.q);
    if (input.layer.value() + 1 == shape_.layers) ++step_;
  }

  void Print(const std::string& context) const {
    for (const Candidate& candidate : candidates_) {
      decoder::Mean all[4];
      for (size_t layer = 0; layer < candidate.recall.size(); ++layer) {
        const double values[] = {candidate.recall[layer].value(), candidate.mass[layer].value(),
                                 candidate.error[layer].value(), candidate.attended[layer].value()};
        for (int i = 0; i < 4; ++i) all[i].Add(values[i]);
        Print(context, candidate, layer, values, candidate.error[layer].count);
      }
      const double values[] = {all[0].value(), all[1].value(), all[2].value(), all[3].value()};
      Print(context, candidate, nlohmann::json(), values, candidate.error[0].count);
    }
  }

 private:
  // One KV head of one token.
  struct Head {
    std::vector<float> scores;               // [group, zone], scaled
    std::vector<std::vector<double>> dense;  // [group][head_dim]
    std::vector<double> total, top;          // [group]: of all weights exp(score - top)
    std::vector<Sum> window;                 // [group]: sink, local and new rows
    std::vector<Position> best;              // of the zone by group score, the best first
  };

  static void Print(const std::string& context, const Candidate& candidate,
                    const nlohmann::json& layer, const double* values, int64_t tokens) {
    const nlohmann::json json = {
        {"context", context}, {"method", candidate.name}, {"rows", candidate.rows},
        {"layer", layer},     {"tokens", tokens},         {"recall", values[0]},
        {"mass", values[1]},  {"error", values[2]},       {"attended", values[3]}};
    std::printf("%s\n", json.dump().c_str());
  }

  void JudgeLayer(Layer layer, const float* q) {
    const int64_t group = shape_.group(), d = shape_.head_dim;
    std::vector<Head> heads(static_cast<size_t>(shape_.kv_heads));
    pool_->ParallelFor(shape_.kv_heads, [&](int64_t h) {
      heads[static_cast<size_t>(h)] =
          DenseHead(layer, KvHead(static_cast<int32_t>(h)), q + h * group * d);
    });
    pool_->ParallelFor(static_cast<int64_t>(candidates_.size()), [&](int64_t i) {
      Candidate& candidate = candidates_[static_cast<size_t>(i)];
      double off = 0, norm = 0;
      for (int32_t h = 0; h < shape_.kv_heads; ++h) {
        JudgeHead(layer, KvHead(h), q + h * group * d, heads[static_cast<size_t>(h)], candidate,
                  off, norm);
      }
      candidate.error[static_cast<size_t>(layer.value())].Add(std::sqrt(off / norm));
    });
  }

  void Widen(const void* row, std::vector<float>& out) const {
    out.resize(static_cast<size_t>(shape_.head_dim));
    WidenToFloat(DType::kBf16, row, shape_.head_dim, out.data());
  }

  Head DenseHead(Layer layer, KvHead kv, const float* q) const {
    const int64_t group = shape_.group(), d = shape_.head_dim, n = zone_.rows();
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const decoder::HeadView& view = rows_.At(layer, kv);
    Head head;
    head.scores.resize(static_cast<size_t>(group * n));
    for (Position at = zone_.begin; at < zone_.end;) {
      const int64_t count = view.Contiguous(at, zone_.end);
      kernels::DotScore(q, group, d, view.Key(at), count, scale,
                        head.scores.data() + (at - zone_.begin), n);
      at += count;
    }
    std::vector<float> base, group_scores(static_cast<size_t>(n)), row;
    for (int64_t g = 0; g < group; ++g)
      base.push_back(kernels::LogSumExp(&head.scores[static_cast<size_t>(g * n)], n));
    kernels::GroupScore(head.scores.data(), group, n, n, base.data(), group_scores.data());
    for (Position i = 0; i < n; ++i) head.best.push_back(i);
    std::stable_sort(head.best.begin(), head.best.end(), [&](Position a, Position b) {
      return group_scores[static_cast<size_t>(a)] > group_scores[static_cast<size_t>(b)];
    });
    for (int64_t g = 0; g < group; ++g) {
      const float* const one = q + g * d;
      Sum window(d);
      head.top.push_back(base[static_cast<size_t>(g)]);
      const double top = head.top.back();
      const auto add = [&](const float* k, const float* v) {
        double dot = 0;
        for (int64_t c = 0; c < d; ++c) dot += double{one[c]} * k[c];
        window.Add(std::exp(dot * scale - top), v);
      };
      std::vector<float> value;
      for (const RowRange range : {RowRange{0, zone_.begin}, RowRange{zone_.end, document_end_}}) {
        for (Position at = range.begin; at < range.end; ++at) {
          Widen(view.Key(at), row);
          Widen(view.Value(at), value);
          add(row.data(), value.data());
        }
      }
      const auto l = static_cast<size_t>(layer.value());
      const int64_t width = int64_t{shape_.kv_heads} * d;
      for (int64_t at = kv.value() * d; at < static_cast<int64_t>(new_k_[l].size()); at += width)
        add(&new_k_[l][static_cast<size_t>(at)], &new_v_[l][static_cast<size_t>(at)]);
      Sum all = window;
      AddRows(layer, kv, head, g, nullptr, all);
      head.total.push_back(all.total);
      for (double& x : all.out) x /= all.total;
      head.dense.push_back(std::move(all.out));
      head.window.push_back(std::move(window));
    }
    return head;
  }

  // chosen: null: every row of the zone.
  void AddRows(Layer layer, KvHead kv, const Head& head, int64_t g,
               const std::vector<Position>* chosen, Sum& sum) const {
    const decoder::HeadView& view = rows_.At(layer, kv);
    const int64_t n = zone_.rows(), count = chosen ? static_cast<int64_t>(chosen->size()) : n;
    std::vector<float> value;
    for (int64_t i = 0; i < count; ++i) {
      const Position row = chosen ? (*chosen)[static_cast<size_t>(i)] : zone_.begin + i;
      const float score = head.scores[static_cast<size_t>(g * n + row - zone_.begin)];
      Widen(view.Value(row), value);
      sum.Add(std::exp(score - head.top[static_cast<size_t>(g)]), value.data());
    }
  }

  void JudgeHead(Layer layer, KvHead kv, const float* q, const Head& head, Candidate& candidate,
                 double& off, double& norm) const {
    const auto l = static_cast<size_t>(layer.value());
    const int64_t group = shape_.group(), d = shape_.head_dim, n = zone_.rows();
    int64_t budget = candidate.rows;
    if (!candidate.plan.empty()) {
      budget =
          candidate
              .plan[l * static_cast<size_t>(shape_.kv_heads) + static_cast<size_t>(kv.value())];
    }
    decoder::SelectRequest request{.layer = layer, .head = kv, .q = q, .queries = group};
    request.budget = std::max<int64_t>(1, budget);
    request.step = step_;
    SelectedRows selected;
    candidate.selector->Select(request, selected);
    const auto count = static_cast<int64_t>(selected.rows.size());
    std::vector<Position> best(head.best.begin(), head.best.begin() + count), both;
    for (Position& row : best) row += zone_.begin;
    std::sort(best.begin(), best.end());
    std::set_intersection(best.begin(), best.end(), selected.rows.begin(), selected.rows.end(),
                          std::back_inserter(both));
    candidate.recall[l].Add(static_cast<double>(both.size()) / static_cast<double>(count));
    candidate.attended[l].Add(static_cast<double>(count));
    std::vector<float> rest(static_cast<size_t>(group * d)),
        lse(static_cast<size_t>(group), -INFINITY);
    if (candidate.term && count < n) Estimate(layer, kv, q, head, selected, rest, lse);
    for (int64_t g = 0; g < group; ++g) {
      Sum sum = head.window[static_cast<size_t>(g)];
      AddRows(layer, kv, head, g, &selected.rows, sum);
      candidate.mass[l].Add(sum.total / head.total[static_cast<size_t>(g)]);
      if (lse[static_cast<size_t>(g)] > -INFINITY) {
        sum.Add(std::exp(lse[static_cast<size_t>(g)] - head.top[static_cast<size_t>(g)]),
                &rest[static_cast<size_t>(g * d)]);
      }
      for (size_t c = 0; c < sum.out.size(); ++c) {
        const double dense = head.dense[static_cast<size_t>(g)][c];
        off += (sum.out[c] / sum.total - dense) * (sum.out[c] / sum.total - dense);
        norm += dense * dense;
      }
    }
  }

  void Estimate(Layer layer, KvHead kv, const float* q, const Head& head,
                const SelectedRows& selected, std::vector<float>& out,
                std::vector<float>& lse) const {
    std::vector<float> scores;
    for (int64_t g = 0; g < shape_.group(); ++g) {
      for (const Position row : selected.rows) {
        scores.push_back(head.scores[static_cast<size_t>(g * zone_.rows() + row - zone_.begin)]);
      }
    }
    retrieval::EstimateRequest request;
    request.queries = q;
    request.group = shape_.group();
    request.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    request.zone = zone_;
    request.selected = selected.rows;
    request.scores = scores.data();
    request.bound = selected.bound.empty() ? nullptr : selected.bound.data();
    request.out = out.data();
    request.lse = lse.data();
    CARREL_CHECK(rows_.EstimateRest(layer, kv, request).ok());
  }

  const AttentionShape shape_;
  const RowRange zone_;
  const HostRows& rows_;
  ThreadPool* const pool_;
  std::vector<Candidate> candidates_;
  std::vector<std::vector<float>> new_k_, new_v_;  // [layers][tokens, kv_heads, head_dim]
  Position document_end_ = 0;
  int64_t step_ = 0;
};

absl::StatusOr<Candidate> MakeCandidate(std::string name, const std::string& method, int64_t rows,
                                        const AttentionShape& shape, RowRange zone,
                                        const HostRows& from, ThreadPool* pool) {
  Candidate candidate;
  candidate.name = std::move(name);
  candidate.rows = rows;
  ASSIGN_OR_RETURN(const decoder::SelectorConfig config, decoder::ParseSelector(method));
  ASSIGN_OR_RETURN(candidate.selector, decoder::MakeRowSelector(config, shape, zone, from, pool));
  for (auto* means : {&candidate.recall, &candidate.mass, &candidate.error, &candidate.attended}) {
    means->resize(static_cast<size_t>(shape.layers));
  }
  return candidate;
}

absl::StatusOr<std::vector<Candidate>> MakeCandidates(absl::Span<char* const> arguments,
                                                      const AttentionShape& shape, RowRange zone,
                                                      const v1::Manifest& manifest,
                                                      const HostRows& from, ThreadPool* pool) {
  std::vector<Candidate> candidates;
  for (absl::string_view text : absl::StrSplit(arguments[0], ',')) {
    int64_t rows = 0;
    if (!absl::SimpleAtoi(text, &rows) || rows < 1)
      return absl::InvalidArgumentError(absl::StrCat("rows=", text, " is no number from 1"));
    for (const char* method : arguments.subspan(1)) {
      ASSIGN_OR_RETURN(Candidate one, MakeCandidate(method, method, rows, shape, zone, from, pool));
      candidates.push_back(std::move(one));
    }
    if (!from.has_summaries()) continue;
    ASSIGN_OR_RETURN(Candidate term, MakeCandidate("term", "exact", rows, shape, zone, from, pool));
    term.term = true;
    candidates.push_back(std::move(term));
  }
  if (!from.has_summaries()) return candidates;
  ASSIGN_OR_RETURN(const std::vector<decoder::HeadErrors> errors,
                   decoder::ErrorsOf(decoder::FactsOf(manifest), /*estimate=*/true));
  for (const bool term : {false, true}) {
    ASSIGN_OR_RETURN(Candidate balanced,
                     MakeCandidate(term ? "balanced" : "balanced without the term", "exact", 0,
                                   shape, zone, from, pool));
    balanced.plan = decoder::PlanRows(errors, 0, zone.rows(),
                                      decoder::TargetError(decoder::Fidelity::kBalanced))
                        .rows;
    balanced.term = term;
    candidates.push_back(std::move(balanced));
  }
  return candidates;
}

absl::Status Run(absl::Span<char* const> arguments) {
  const std::string folder = arguments[1], context = arguments[2];
  ASSIGN_OR_RETURN(const std::vector<eval::Question> questions, eval::ReadQuestions(arguments[3]));
  ASSIGN_OR_RETURN(const std::shared_ptr<library::LoadedModel> model,
                   library::LoadedModel::Load(arguments[0], "", 0));
  library::StoreAddress address;
  address.folder = folder;
  ASSIGN_OR_RETURN(std::shared_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(address, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const v1::Manifest manifest, store->store()->GetManifest(context));
  ASSIGN_OR_RETURN(const std::shared_ptr<const HostRows> rows,
                   library::MapContextRows(folder, context, model->pool()));
  library::DecoderSpec spec;
  spec.context = context;
  spec.folder = folder;
  spec.config.selection = select::All();
  spec.config.sink = kSink;
  spec.config.local = kLocal;
  spec.config.zone = decoder::HostZoneOptions{};
  ASSIGN_OR_RETURN(const std::unique_ptr<library::OpenDecoder> open,
                   library::OpenDecoder::Create(std::move(spec), model, store));
  const RowRange zone{kSink, rows->tokens() - kLocal};
  if (zone.end <= zone.begin) return absl::InvalidArgumentError("the document is all window");
  const AttentionShape shape = model->checkpoint().config.shape;
  ASSIGN_OR_RETURN(
      std::vector<Candidate> candidates,
      MakeCandidates(arguments.subspan(4), shape, zone, manifest, *rows, model->pool()));
  Judge judge(shape, zone, *rows, model->pool(), std::move(candidates));
  open->decoder().set_observer(
      [&](const model::AttentionInput& input, const float*) { judge.See(input); });
  library::DocumentEndsCache cache;
  ASSIGN_OR_RETURN(const library::DocumentEnds ends,
                   cache.Of(context, open->decoder().content_id(), *store));
  for (const eval::Question& question : questions) {
    ASSIGN_OR_RETURN(const model::Seam prompt,
                     model::JoinTokens(*model->checkpoint().tokenizer, ends.last,
                                       open->decoder().most_given_up(), question.prompt));
    decoder::GenerateOptions options;
    options.max_tokens = kMaxTokens;
    options.give_up = prompt.give_up;
    judge.StartQuestion(prompt.give_up);
    RETURN_IF_ERROR(open->decoder().Generate(prompt.tokens, options).status());
  }
  judge.Print(context);
  return absl::OkStatus();
}

}  // namespace
}  // namespace carrel

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr,
                 "usage: choice_bench MODEL STORE CONTEXT QUESTIONS ROWS[,ROWS..] METHOD...\n");
    return 2;
  }
  const absl::Status status = carrel::Run(absl::MakeConstSpan(argv + 1, argc - 1));
  if (!status.ok()) std::fprintf(stderr, "choice_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
