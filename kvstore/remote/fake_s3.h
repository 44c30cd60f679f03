// What:   an object store of this process that speaks S3 over HTTP on loopback, in memory, and what a test
//         may do to it: look, damage, refuse, break off. Tests only.
// Edge:   it knows what s3_client.h asks for; it holds bodies against x-amz-checksum-sha256, and checks
//         conditions and the payload under one lock. Of signatures it checks the access key alone: real
//         servers check the rest (object_store_test.cc).
// Threads: any; a thread per connection.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

struct FakeRequest {
  std::string method;
  std::string key;  // decoded, without the bucket
  std::map<std::string, std::string> query, headers;
  std::string body;
};

struct FakeReply {
  int status = 200;
  std::string body = {};
  std::map<std::string, std::string> headers = {};
  bool cut = false;  // the connection ends after half of the body
};

class FakeS3 {
 public:
  explicit FakeS3(std::string access_key = "test-access");
  ~FakeS3();

  std::string endpoint() const;  // http://127.0.0.1:PORT
  static constexpr char kBucket[] = "carrel-test";

  // Asked before each request is looked at; a reply is given instead of the store's.
  void Intercept(std::function<std::optional<FakeReply>(const FakeRequest&)> intercept);
  // What objects and uploads are as old as from now on: their times are moved back.
  void Age(absl::Duration by);

  std::map<std::string, std::string> Objects() const;
  void Change(const std::string& key, const std::function<void(std::string&)>& change);
  int open_uploads() const;
  int64_t requests() const { return requests_; }
  int64_t bytes_put() const { return bytes_put_; }

 private:
  struct Object {
    std::string bytes;
    absl::Time modified;
    std::string etag;
  };
  struct Upload {
    std::string key;
    absl::Time begun;
    std::map<int, std::string> parts;
  };
  void Accept();
  void Serve(int fd);
  FakeReply Answer(const FakeRequest& request);
  FakeReply Put(const FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeReply Get(const FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeReply Remove(const FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeReply List(const FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeReply Uploads(const FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  FakeReply OfUpload(const FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string access_key_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<int64_t> requests_{0}, bytes_put_{0};
  mutable absl::Mutex mu_;
  std::function<std::optional<FakeReply>(const FakeRequest&)> intercept_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, Object> objects_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, Upload> uploads_ ABSL_GUARDED_BY(mu_);
  int next_upload_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<int> open_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  std::thread accepting_;
};

}  // namespace carrel::kvstore
