// Methods that choose pieces of consecutive rows, held to their definitions in double precision.
#include "lab/methods/zone_pieces.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "common/test_util.h"
#include "decoder/select/random_rows.h"

namespace carrel::decoder {
namespace {

// [queries][pieces]
using Scores = std::vector<std::vector<double>>;
using ScoreOf = std::function<double(const float* q, RowRange piece)>;

class ZonePiecesTest : public testing::Test {
 protected:
  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(rng_() % static_cast<uint64_t>(bound));
  }

  // Rows of a new zone, and the method's choice of them.
  void Select(const std::string& method, int64_t piece_rows) {
    const int64_t tokens = 40 + Below(900);
    rows_.emplace(rng_, kShape, tokens, 1 + Below(tokens));
    pieces_ = {{Below(5), tokens - Below(5)}, piece_rows};
    q_ = RandomNormal(rng_, kShape.group() * kShape.head_dim);
    selector_ = *MakeRowSelector(*ParseSelector(method), kShape, pieces_.zone, *rows_, &pool_);
    selection_ = {};
    selector_->Select({.layer = kLayer,
                       .head = kHead,
                       .q = q_.data(),
                       .queries = kShape.group(),
                       .budget = budget_ = 1 + Below(pieces_.zone.rows() - 1)},
                      selection_);
  }

  // Pieces that were chosen. Each is whole, but what the budget cuts off.
  std::set<int64_t> Chosen() {
    std::set<int64_t> chosen;
    for (const Position row : selection_.rows) {
      chosen.insert((row - pieces_.zone.begin) / pieces_.rows);
    }
    int64_t whole = 0;
    for (const int64_t piece : chosen) whole += pieces_.Of(piece).rows();
    EXPECT_EQ(static_cast<int64_t>(selection_.rows.size()), std::min(budget_, whole));
    EXPECT_EQ(static_cast<int64_t>(chosen.size()),
              std::min(pieces_.count(), std::max<int64_t>(1, budget_ / pieces_.rows)));
    return chosen;
  }

  // By the definition: of each piece the largest log-probability that a q head gives it.
  std::vector<double> GroupScores(const ScoreOf& score) {
    std::vector<double> best(static_cast<size_t>(pieces_.count()), -INFINITY);
    for (int64_t h = 0; h < kShape.group(); ++h) {
      std::vector<double> scores;
      double sum = 0;
      for (int64_t piece = 0; piece < pieces_.count(); ++piece) {
        scores.push_back(score(&q_[static_cast<size_t>(h * kShape.head_dim)], pieces_.Of(piece)) /
                         std::sqrt(static_cast<double>(kShape.head_dim)));
        sum += std::exp(scores.back());
      }
      for (size_t i = 0; i < scores.size(); ++i) {
        best[i] = std::max(best[i], scores[i] - std::log(sum));
      }
    }
    return best;
  }

  // No piece that was left out is better than one that was chosen, but for rounding.
  void ExpectBest(const std::vector<double>& scores, const std::set<int64_t>& chosen) {
    double worst = INFINITY, other = -INFINITY;
    for (size_t i = 0; i < scores.size(); ++i) {
      if (chosen.contains(static_cast<int64_t>(i))) {
        worst = std::min(worst, scores[i]);
      } else {
        other = std::max(other, scores[i]);
      }
    }
    EXPECT_GE(worst, other - 1e-4);
  }

  double Key(Position row, int64_t c) const { return rows_->Key(kLayer, kHead, row, c); }

  static constexpr AttentionShape kShape{.layers = 2, .q_heads = 6, .kv_heads = 2, .head_dim = 16};
  static constexpr Layer kLayer{1};
  static constexpr KvHead kHead{1};
  std::mt19937_64 rng_{TestSeed()};
  ThreadPool pool_{1};
  std::optional<RandomRows> rows_;
  ZonePieces pieces_;
  std::vector<float> q_;
  std::unique_ptr<RowSelector> selector_;
  SelectedRows selection_;
  int64_t budget_ = 0;
};

TEST_F(ZonePiecesTest, Pages_AreThoseWithTheLargestBounds) {
  for (int round = 0; round < 30; ++round) {
    const int64_t rows = round % 3 == 0 ? 16 : 1 + Below(40);
    Select(absl::StrCat("pages:rows=", rows), rows);
    ExpectBest(GroupScores([&](const float* q, RowRange page) {
                 double sum = 0;
                 for (int64_t c = 0; c < kShape.head_dim; ++c) {
                   double least = INFINITY, largest = -INFINITY;
                   for (Position row = page.begin; row < page.end; ++row) {
                     least = std::min(least, Key(row, c));
                     largest = std::max(largest, Key(row, c));
                   }
                   sum += std::max(q[c] * least, q[c] * largest);
                 }
                 return sum;
               }),
               Chosen());
    EXPECT_EQ(selection_.visited, pieces_.count());
    EXPECT_EQ(selection_.bytes_read, pieces_.count() * kShape.head_dim * 4);
    EXPECT_TRUE(selection_.bound.empty());
  }
}

TEST_F(ZonePiecesTest, Landmarks_AreTheBestMeans) {
  for (int round = 0; round < 30; ++round) {
    const int64_t rows = round % 3 == 0 ? 8 : 1 + Below(40);
    Select(absl::StrCat("landmarks:chunk=", rows), rows);
    ExpectBest(GroupScores([&](const float* q, RowRange chunk) {
                 double sum = 0;
                 for (int64_t c = 0; c < kShape.head_dim; ++c) {
                   double mean = 0;
                   for (Position row = chunk.begin; row < chunk.end; ++row) mean += Key(row, c);
                   mean /= static_cast<double>(chunk.rows());
                   sum += q[c] * Bf16ToFloat(FloatToBf16(static_cast<float>(mean)));
                 }
                 return sum;
               }),
               Chosen());
    EXPECT_EQ(selection_.visited, pieces_.count());
    EXPECT_EQ(selection_.bytes_read, pieces_.count() * kShape.head_dim * 2);
  }
}

// Half of the room at most is theirs, the worst first.
TEST_F(ZonePiecesTest, Landmarks_Outliers_AreChosenWhateverTheyScore) {
  for (int round = 0; round < 30; ++round) {
    const int64_t wanted = 1 + Below(20);
    Select(absl::StrCat("landmarks:outliers=", wanted), 8);
    const std::set<int64_t> chosen = Chosen();
    std::vector<double> least;  // cosine of a key of the chunk and the mean
    for (int64_t chunk = 0; chunk < pieces_.count(); ++chunk) {
      const RowRange range = pieces_.Of(chunk);
      std::vector<double> mean(static_cast<size_t>(kShape.head_dim));
      for (Position row = range.begin; row < range.end; ++row) {
        for (size_t c = 0; c < mean.size(); ++c) mean[c] += Key(row, static_cast<int64_t>(c));
      }
      double worst = INFINITY;
      for (Position row = range.begin; row < range.end; ++row) {
        double dot = 0, kk = 0, mm = 0;
        for (size_t c = 0; c < mean.size(); ++c) {
          const double key = Key(row, static_cast<int64_t>(c));
          dot += key * mean[c];
          kk += key * key;
          mm += mean[c] * mean[c];
        }
        worst = std::min(worst, dot / std::sqrt(kk * mm));
      }
      least.push_back(worst);
    }
    std::vector<double> sorted = least;
    std::sort(sorted.begin(), sorted.end());
    const int64_t kept = std::min({wanted, budget_ / 8 / 2, pieces_.count()});
    for (size_t chunk = 0; kept > 0 && chunk < least.size(); ++chunk) {
      if (least[chunk] < sorted[static_cast<size_t>(kept - 1)] - 5e-3) {
        EXPECT_TRUE(chosen.contains(static_cast<int64_t>(chunk)));
      }
    }
  }
}

TEST_F(ZonePiecesTest, APieceOfOneRow_IsTheExactChoice) {
  for (const char* method : {"pages:rows=1", "landmarks:chunk=1"}) {
    Select(method, 1);
    SelectedRows exact;
    (*MakeRowSelector(*ParseSelector("exact"), kShape, pieces_.zone, *rows_, &pool_))
        ->Select({.layer = kLayer,
                  .head = kHead,
                  .q = q_.data(),
                  .queries = kShape.group(),
                  .budget = budget_},
                 exact);
    std::vector<Position> both;
    std::set_intersection(exact.rows.begin(), exact.rows.end(), selection_.rows.begin(),
                          selection_.rows.end(), std::back_inserter(both));
    EXPECT_GE(both.size() + 1, exact.rows.size()) << method;  // scores next to each other may round
  }
}

TEST_F(ZonePiecesTest, ThreadsChangeNothing) {
  Select("landmarks:outliers=3", 8);
  const std::vector<Position> found = selection_.rows;
  ThreadPool many(3);
  selector_ =
      *MakeRowSelector(*ParseSelector("landmarks:outliers=3"), kShape, pieces_.zone, *rows_, &many);
  SelectedRows again;
  selector_->Select({.layer = kLayer,
                     .head = kHead,
                     .q = q_.data(),
                     .queries = kShape.group(),
                     .budget = budget_},
                    again);
  EXPECT_EQ(again.rows, found);
}

}  // namespace
}  // namespace carrel::decoder
