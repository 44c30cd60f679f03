#include "serving/turn_queue.h"

#include <random>
#include <string>
#include <vector>

#include "common/test_random.h"
#include "common/test_util.h"

namespace carrel::serving {
namespace {

struct Job {
  Turn turn;
  char name = ' ';
  int64_t id = 0;
};

Turn NewTurn() { return std::make_shared<const int>(0); }

// The names of what is given places until none is left, one place after the other.
std::string Order(TurnQueue<Job>& queue) {
  std::string order;
  while (const auto job = queue.Take()) {
    order += job->name;
    queue.GiveBack(job->turn);
  }
  return order;
}

TEST(TurnQueueTest, ManyOfOneTurn_LeaveTheOthersTheirTurn) {
  TurnQueue<Job> queue({.places = 1});
  const Turn many = NewTurn(), few = NewTurn(), late = NewTurn();
  for (int i = 0; i < 6; ++i) CARREL_ASSERT_OK(queue.Push({many, 'm'}));
  for (int i = 0; i < 2; ++i) CARREL_ASSERT_OK(queue.Push({few, 'f'}));
  CARREL_ASSERT_OK(queue.Push({late, 'l'}));
  EXPECT_EQ(Order(queue), "mflmfmmmm");
  EXPECT_EQ(queue.size(), 0);
}

TEST(TurnQueueTest, OfOneTurn_TheOrderIsTheirs) {
  TurnQueue<Job> queue({.places = 2});
  const Turn turn = NewTurn();
  for (const char name : {'a', 'b', 'c', 'd'}) CARREL_ASSERT_OK(queue.Push({turn, name, name}));
  const auto first = queue.Take(), second = queue.Take();
  EXPECT_EQ(first->name, 'a');
  queue.PutBack(*first);  // neither could be begun
  queue.PutBack(*second);
  EXPECT_EQ(Order(queue), "abcd");
}

// Who has the fewest in places goes first, however long each of them takes.
TEST(TurnQueueTest, PlacesAreSharedEqually) {
  TurnQueue<Job> queue({.places = 4});
  const Turn slow = NewTurn(), fast = NewTurn();
  for (int i = 0; i < 8; ++i) CARREL_ASSERT_OK(queue.Push({slow, 's'}));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(queue.Take()->name, 's');  // alone it has all
  EXPECT_FALSE(queue.Take().has_value());
  for (int i = 0; i < 8; ++i) CARREL_ASSERT_OK(queue.Push({fast, 'f'}));
  EXPECT_EQ(queue.Take()->name, 'f');  // in reserve, as it has none
  EXPECT_FALSE(queue.Take().has_value());
  queue.GiveBack(slow);
  EXPECT_FALSE(queue.Take().has_value());  // four run beside
  queue.GiveBack(slow);
  EXPECT_EQ(queue.Take()->name, 'f');
  queue.GiveBack(fast);
  EXPECT_EQ(queue.Take()->name, 'f');  // it has one, the other two
}

TEST(TurnQueueTest, PlacesInReserve_AreForTurnsThatHaveNone) {
  TurnQueue<Job> queue({.places = 5});
  EXPECT_EQ(queue.most_places(), 7);
  const Turn many = NewTurn();
  for (int i = 0; i < 7; ++i) CARREL_ASSERT_OK(queue.Push({many, 'm'}));
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(queue.Take().has_value());
  EXPECT_FALSE(queue.Take().has_value());
  CARREL_ASSERT_OK(queue.Push({nullptr, 'n'}));  // nobody's own has none
  EXPECT_FALSE(queue.Take().has_value());
  const Turn other = NewTurn(), third = NewTurn(), fourth = NewTurn();
  for (const Turn& turn : {other, other, third, fourth}) CARREL_ASSERT_OK(queue.Push({turn, 'o'}));
  EXPECT_EQ(queue.Take()->turn, other);
  EXPECT_EQ(queue.Take()->turn, third);
  EXPECT_FALSE(queue.Take().has_value());  // all seven are taken
}

TEST(TurnQueueTest, AsManyWaitAsMay_InAllAndOfOneTurn) {
  TurnQueue<Job> queue({.places = 1, .waiting = 5, .of_one_turn = 2, .what = "answers"});
  const Turn alice = NewTurn(), bob = NewTurn();
  CARREL_EXPECT_OK(queue.Push({alice, 'a'}));
  CARREL_EXPECT_OK(queue.Push({alice, 'a'}));
  EXPECT_THAT(queue.Push({alice, 'a'}), StatusIs(absl::StatusCode::kResourceExhausted,
                                                 "2 answers of the same key or tenant"));
  queue.PushAnyway({alice, 'b'});
  CARREL_EXPECT_OK(queue.Push({bob, 'c'}));
  CARREL_EXPECT_OK(queue.Push({bob, 'c'}));
  EXPECT_THAT(queue.Push({bob, 'c'}),
              StatusIs(absl::StatusCode::kResourceExhausted, "5 answers wait already"));
  EXPECT_EQ(Order(queue), "acacb");
}

// Where nobody has a turn of his own, as many wait as may.
TEST(TurnQueueTest, NobodysOwn_AreBoundedByAllAlone) {
  TurnQueue<Job> queue({.places = 1, .waiting = 4, .of_one_turn = 1});
  for (int i = 0; i < 4; ++i) CARREL_EXPECT_OK(queue.Push({nullptr, 'n'}));
  EXPECT_FALSE(queue.Push({nullptr, 'n'}).ok());
  EXPECT_EQ(Order(queue), "nnnn");
}

// However they come and go, places are never more than there are, and nobody waits beside a free one.
TEST(TurnQueueTest, RandomComingsAndGoings_KeepTheRule) {
  std::mt19937_64 random(TestSeed());
  const std::vector<Turn> turns = {nullptr, NewTurn(), NewTurn(), NewTurn()};
  for (int trial = 0; trial < 50; ++trial) {
    const auto places = static_cast<int64_t>(1 + random() % 6);
    TurnQueue<Job> queue({.places = places});
    std::vector<Turn> running;
    for (int step = 0; step < 400; ++step) {
      if (random() % 2 == 0) {
        CARREL_ASSERT_OK(queue.Push({turns[random() % turns.size()], 'x'}));
      }
      if (!running.empty() && random() % 3 == 0) {
        std::swap(running.back(), running[random() % running.size()]);
        queue.GiveBack(running.back());
        running.pop_back();
      }
      while (auto job = queue.Take()) running.push_back(job->turn);
      const auto now = static_cast<int64_t>(running.size());
      ASSERT_LE(now, queue.most_places());
      ASSERT_TRUE(queue.size() == 0 || now >= places);
      for (const Job& job : queue.waiting()) {
        const auto mine = std::count(running.begin(), running.end(), job.turn);
        ASSERT_TRUE(job.turn == nullptr || mine > 0 || now == queue.most_places());
      }
    }
  }
}

}  // namespace
}  // namespace carrel::serving
