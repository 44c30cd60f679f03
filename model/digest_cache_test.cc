#include "model/digest_cache.h"

#include <sys/stat.h>
#include <sys/time.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "common/checksum.h"
#include "common/file.h"
#include "common/test_util.h"

namespace carrel::model {
namespace {

namespace fs = std::filesystem;

class DigestCacheTest : public testing::Test {
 protected:
  DigestCacheTest() : folder_(FreshTempDir()), cache_(folder_ + "/deep/cache", InAMinute) {
    Write("weights", "content");
  }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  }
  std::shared_ptr<const MappedFile> Open(const std::string& name) const {
    return *MappedFile::Open(folder_ + "/" + name);
  }
  // When what the test writes was changed long enough ago to be remembered.
  static int64_t InAMinute() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::nanoseconds(now + std::chrono::minutes(1)).count();
  }
  std::string Get(const DigestCache& cache, const std::string& what, const std::string& name) {
    return cache.Get(what, {Open(name)}, [&] {
      ++computed_;
      return Sha256Hex(*ReadFile(folder_ + "/" + name));
    });
  }
  std::vector<fs::path> Entries() const {
    std::vector<fs::path> entries;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder_ + "/deep/cache", error)) {
      entries.push_back(entry.path());
    }
    return entries;
  }
  const std::string folder_;
  const DigestCache cache_;
  int computed_ = 0;
};

TEST_F(DigestCacheTest, SameFile_IsHashedOnce) {
  const std::string digest = Get(cache_, "w", "weights");
  EXPECT_EQ(digest, Sha256Hex("content"));
  EXPECT_EQ(Get(cache_, "w", "weights"), digest);
  EXPECT_EQ(Get(DigestCache(folder_ + "/deep/cache"), "w", "weights"), digest);
  EXPECT_EQ(computed_, 1);
  EXPECT_EQ(Get(cache_, "other", "weights"), digest);  // another kind of digest
  EXPECT_EQ(computed_, 2);
  struct stat folder;
  ASSERT_EQ(stat((folder_ + "/deep/cache").c_str(), &folder), 0);
  EXPECT_EQ(folder.st_mode & 0777, 0700u);
  EXPECT_EQ(Entries().size(), 2u);
}

TEST_F(DigestCacheTest, FileChangedInPlaceOrReplaced_IsHashedAgain) {
  (void)Get(cache_, "w", "weights");
  // The same size, and the time of modification set back: the time of change betrays it.
  const FileIdentity before = Open("weights")->opened_as();
  Write("weights", "CONTENT");
  const timeval time = {before.modified_ns / 1000000000, before.modified_ns % 1000000000 / 1000};
  const timeval times[2] = {time, time};
  ASSERT_EQ(utimes((folder_ + "/weights").c_str(), times), 0);
  EXPECT_EQ(Get(cache_, "w", "weights"), Sha256Hex("CONTENT"));
  Write("new", "content");
  fs::rename(folder_ + "/new", folder_ + "/weights");
  EXPECT_EQ(Get(cache_, "w", "weights"), Sha256Hex("content"));
  EXPECT_EQ(computed_, 3);
}

TEST_F(DigestCacheTest, FileJustChanged_IsNotRemembered) {
  const DigestCache now(folder_ + "/deep/cache");
  (void)Get(now, "w", "weights");
  (void)Get(now, "w", "weights");
  EXPECT_EQ(computed_, 2);
  EXPECT_TRUE(Entries().empty());
}

TEST_F(DigestCacheTest, FileChangedSinceItWasOpened_IsNotRemembered) {
  const auto opened = Open("weights");
  Write("weights", "other");
  (void)cache_.Get("w", {opened}, [] { return std::string(64, 'a'); });
  EXPECT_TRUE(Entries().empty());
}

TEST_F(DigestCacheTest, DamagedEntry_IsMadeAgain) {
  const std::string digest = Get(cache_, "w", "weights");
  const fs::path entry = Entries().at(0);
  const std::string whole = *ReadFile(entry.string());
  for (size_t at = 0; at <= whole.size(); at += 9) {
    std::string bad = whole.substr(0, at);
    if (at % 2 == 0 && at < whole.size()) {
      bad = whole;
      bad[at] = bad[at] == '0' ? '1' : '0';
    }
    if (bad == whole) continue;
    std::ofstream(entry, std::ios::binary) << bad;
    computed_ = 0;
    EXPECT_EQ(Get(cache_, "w", "weights"), digest) << at;
    EXPECT_EQ(computed_, 1) << at;
  }
}

TEST_F(DigestCacheTest, NoFolderOrOneThatCannotBe_CostsTheHashingAlone) {
  const std::string digest = Sha256Hex("content");
  EXPECT_EQ(Get(DigestCache(""), "w", "weights"), digest);
  EXPECT_EQ(Get(DigestCache(folder_ + "/weights/cache", InAMinute), "w", "weights"), digest);
  EXPECT_EQ(cache_.Get("w", {}, [] { return std::string("x"); }), "x");
  EXPECT_TRUE(Entries().empty());
}

TEST_F(DigestCacheTest, ManyEntries_AreDropped) {
  (void)Get(cache_, "w", "weights");
  for (int i = 0; i < 1100; ++i) {
    std::ofstream(folder_ + "/deep/cache/" + std::to_string(i) + ".digest") << "x";
  }
  (void)Get(cache_, "other", "weights");
  EXPECT_EQ(Entries().size(), 1u);
}

TEST(DigestCacheFolder, Environment_DecidesIt) {
  const auto with = [](const char* cache, const char* xdg, const char* home) {
    const auto set = [](const char* name, const char* value) {
      if (value == nullptr) {
        unsetenv(name);
      } else {
        setenv(name, value, 1);
      }
    };
    set("CARREL_CACHE", cache);
    set("XDG_CACHE_HOME", xdg);
    set("HOME", home);
    return DigestCache::DefaultFolder();
  };
  EXPECT_EQ(with("/c", "/x", "/h"), "/c");
  EXPECT_EQ(with("", "/x", "/h"), "");
  EXPECT_EQ(with(nullptr, "/x", "/h"), "/x/carrel");
  EXPECT_EQ(with(nullptr, "relative", "/h"), "/h/.cache/carrel");
  EXPECT_EQ(with(nullptr, nullptr, nullptr), "");
}

}  // namespace
}  // namespace carrel::model
