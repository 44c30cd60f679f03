#include "kvstore/remote/fake_s3.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/checksum.h"
#include "common/hmac.h"
#include "common/status.h"
#include "kvstore/remote/xml.h"

namespace carrel::kvstore {
namespace {

FakeReply Error(int status, absl::string_view code) {
  return {.status = status,
          .body = absl::StrCat("<?xml version=\"1.0\"?><Error><Code>", code,
                               "</Code><Message>refused</Message></Error>")};
}

std::string Decoded(absl::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      out += absl::HexStringToBytes(text.substr(i + 1, 2));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string HttpTime(absl::Time time) {
  return absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", time, absl::UTCTimeZone());
}
std::string IsoTime(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone());
}

std::string ValueOf(const std::map<std::string, std::string>& map, const std::string& name) {
  const auto it = map.find(name);
  return it == map.end() ? "" : it->second;
}

// More of the connection's bytes; false: it has ended.
bool Receive(int fd, std::string& buffer) {
  char piece[64 << 10];
  const ssize_t n = recv(fd, piece, sizeof piece, 0);
  if (n <= 0) return false;
  buffer.append(piece, static_cast<size_t>(n));
  return true;
}

// The request at the buffer's beginning, which is taken out of it; nullopt: the connection ended.
std::optional<FakeRequest> NextRequest(int fd, std::string& buffer) {
  size_t end;
  while ((end = buffer.find("\r\n\r\n")) == std::string::npos) {
    if (!Receive(fd, buffer)) return std::nullopt;
  }
  FakeRequest request;
  std::vector<std::string> lines = absl::StrSplit(buffer.substr(0, end), "\r\n");
  const std::vector<std::string> first = absl::StrSplit(lines.at(0), ' ');
  request.method = first.at(0);
  const std::pair<std::string, std::string> target =
      absl::StrSplit(first.at(1), absl::MaxSplits('?', 1));
  const std::pair<std::string, std::string> path =
      absl::StrSplit(target.first.substr(1), absl::MaxSplits('/', 1));
  request.key = Decoded(path.second);
  for (const auto& pair : absl::StrSplit(target.second, '&', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(pair, absl::MaxSplits('=', 1));
    request.query[Decoded(parts.first)] = Decoded(parts.second);
  }
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::pair<std::string, std::string> header =
        absl::StrSplit(lines[i], absl::MaxSplits(':', 1));
    request.headers[absl::AsciiStrToLower(header.first)] =
        std::string(absl::StripAsciiWhitespace(header.second));
  }
  buffer.erase(0, end + 4);
  size_t body = 0;
  (void)absl::SimpleAtoi(ValueOf(request.headers, "content-length"), &body);
  while (buffer.size() < body) {
    if (!Receive(fd, buffer)) return std::nullopt;
  }
  request.body = buffer.substr(0, body);
  buffer.erase(0, body);
  return request;
}

bool SendAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

}  // namespace

FakeS3::FakeS3(std::string access_key) : access_key_(std::move(access_key)) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CARREL_CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CARREL_CHECK(listen(listener_, 128) == 0);
  socklen_t size = sizeof address;
  CARREL_CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  port_ = ntohs(address.sin_port);
  accepting_ = std::thread([this] { Accept(); });
}

FakeS3::~FakeS3() {
  shutdown(listener_, SHUT_RDWR);
  accepting_.join();
  close(listener_);
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    for (const int fd : open_) shutdown(fd, SHUT_RDWR);
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

std::string FakeS3::endpoint() const { return absl::StrCat("http://127.0.0.1:", port_); }

void FakeS3::Intercept(std::function<std::optional<FakeReply>(const FakeRequest&)> intercept) {
  absl::MutexLock lock(&mu_);
  intercept_ = std::move(intercept);
}

void FakeS3::Age(absl::Duration by) {
  absl::MutexLock lock(&mu_);
  for (auto& [key, object] : objects_) object.modified -= by;
  for (auto& [id, upload] : uploads_) upload.begun -= by;
}

std::map<std::string, std::string> FakeS3::Objects() const {
  absl::MutexLock lock(&mu_);
  std::map<std::string, std::string> all;
  for (const auto& [key, object] : objects_) all[key] = object.bytes;
  return all;
}

void FakeS3::Change(const std::string& key, const std::function<void(std::string&)>& change) {
  absl::MutexLock lock(&mu_);
  CARREL_CHECK(objects_.contains(key));
  change(objects_[key].bytes);
}

int FakeS3::open_uploads() const {
  absl::MutexLock lock(&mu_);
  return static_cast<int>(uploads_.size());
}

void FakeS3::Accept() {
  for (;;) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    absl::MutexLock lock(&mu_);
    open_.insert(fd);
    threads_.emplace_back([this, fd] { Serve(fd); });
  }
}

void FakeS3::Serve(int fd) {
  std::string buffer;
  while (const std::optional<FakeRequest> request = NextRequest(fd, buffer)) {
    ++requests_;
    FakeReply reply = Answer(*request);
    std::string head = absl::StrCat("HTTP/1.1 ", reply.status, " x\r\n");
    reply.headers.try_emplace("Date", HttpTime(absl::Now()));
    if (reply.status != 204) {
      reply.headers.try_emplace("Content-Length", absl::StrCat(reply.body.size()));
    }
    for (const auto& [name, value] : reply.headers) {
      absl::StrAppend(&head, name, ": ", value, "\r\n");
    }
    if (request->method == "HEAD") reply.body.clear();
    if (reply.cut) reply.body.resize(reply.body.size() / 2);
    if (!SendAll(fd, absl::StrCat(head, "\r\n", reply.body)) || reply.cut) break;
  }
  absl::MutexLock lock(&mu_);
  open_.erase(fd);
  close(fd);
}

FakeReply FakeS3::Answer(const FakeRequest& request) {
  std::function<std::optional<FakeReply>(const FakeRequest&)> intercept;
  {
    absl::MutexLock lock(&mu_);
    intercept = intercept_;
  }
  if (intercept != nullptr) {
    if (std::optional<FakeReply> reply = intercept(request)) return *std::move(reply);
  }
  const std::string authorization = ValueOf(request.headers, "authorization");
  if (!absl::StrContains(authorization, absl::StrCat("Credential=", access_key_, "/"))) {
    return Error(403, "InvalidAccessKeyId");
  }
  const std::string sum = ValueOf(request.headers, "x-amz-checksum-sha256");
  if (!sum.empty() && sum != absl::Base64Escape(absl::HexStringToBytes(Sha256Hex(request.body)))) {
    return Error(400, "BadDigest");
  }
  absl::MutexLock lock(&mu_);
  if (request.query.contains("uploads")) return Uploads(request);
  if (request.query.contains("uploadId")) return OfUpload(request);
  if (request.key.empty()) return List(request);
  if (request.method == "PUT") return Put(request);
  if (request.method == "DELETE") return Remove(request);
  return Get(request);
}

FakeReply FakeS3::Put(const FakeRequest& request) {
  const auto there = objects_.find(request.key);
  if (request.headers.contains("if-none-match") && there != objects_.end()) {
    return Error(412, "PreconditionFailed");
  }
  const std::string match = ValueOf(request.headers, "if-match");
  if (!match.empty() && (there == objects_.end() || there->second.etag != match)) {
    return Error(412, "PreconditionFailed");
  }
  bytes_put_ += static_cast<int64_t>(request.body.size());
  const std::string etag = absl::StrCat("\"", Md5Hex(request.body), "\"");
  objects_[request.key] = {request.body, absl::Now(), etag};
  return {.headers = {{"ETag", etag}}};
}

FakeReply FakeS3::Get(const FakeRequest& request) {
  const auto it = objects_.find(request.key);
  if (it == objects_.end()) return Error(404, "NoSuchKey");
  const Object& object = it->second;
  FakeReply reply{.body = object.bytes,
                  .headers = {{"ETag", object.etag}, {"Last-Modified", HttpTime(object.modified)}}};
  const std::string range = ValueOf(request.headers, "range");
  if (range.empty()) return reply;
  const std::pair<std::string, std::string> ends =
      absl::StrSplit(range.substr(range.find('=') + 1), '-');
  size_t begin = 0, last = object.bytes.size() - 1;
  (void)absl::SimpleAtoi(ends.first, &begin);
  if (!ends.second.empty()) (void)absl::SimpleAtoi(ends.second, &last);
  if (begin >= object.bytes.size()) return Error(416, "InvalidRange");
  last = std::min(last, object.bytes.size() - 1);
  reply.status = 206;
  reply.body = object.bytes.substr(begin, last - begin + 1);
  reply.headers["Content-Range"] =
      absl::StrCat("bytes ", begin, "-", last, "/", object.bytes.size());
  return reply;
}

FakeReply FakeS3::Remove(const FakeRequest& request) {
  const auto it = objects_.find(request.key);
  const std::string match = ValueOf(request.headers, "if-match");
  if (!match.empty() && (it == objects_.end() || it->second.etag != match)) {
    return Error(412, "PreconditionFailed");
  }
  if (it != objects_.end()) objects_.erase(it);
  return {.status = 204};
}

FakeReply FakeS3::List(const FakeRequest& request) {
  const std::string prefix = ValueOf(request.query, "prefix");
  const std::string token = ValueOf(request.query, "continuation-token");
  int most = 1000;
  (void)absl::SimpleAtoi(ValueOf(request.query, "max-keys"), &most);
  std::string body = "<ListBucketResult>", last;
  int shown = 0;
  bool more = false;
  for (auto it = objects_.lower_bound(prefix); it != objects_.end(); ++it) {
    if (!absl::StartsWith(it->first, prefix)) break;
    if (!token.empty() && it->first <= token) continue;
    if (shown == most) {
      more = true;
      break;
    }
    ++shown;
    last = it->first;
    absl::StrAppend(&body, "<Contents><Key>", XmlEscaped(it->first), "</Key><Size>",
                    it->second.bytes.size(), "</Size><ETag>", XmlEscaped(it->second.etag),
                    "</ETag><LastModified>", IsoTime(it->second.modified),
                    "</LastModified></Contents>");
  }
  absl::StrAppend(&body, "<IsTruncated>", more ? "true" : "false", "</IsTruncated>");
  if (more) {
    absl::StrAppend(&body, "<NextContinuationToken>", XmlEscaped(last), "</NextContinuationToken>");
  }
  return {.body = body + "</ListBucketResult>"};
}

FakeReply FakeS3::Uploads(const FakeRequest& request) {
  if (request.method == "POST") {
    const std::string id = absl::StrCat("upload-", ++next_upload_);
    uploads_[id] = {.key = request.key, .begun = absl::Now(), .parts = {}};
    return {.body = absl::StrCat("<InitiateMultipartUploadResult><UploadId>", id,
                                 "</UploadId></InitiateMultipartUploadResult>")};
  }
  std::string body = "<ListMultipartUploadsResult>";
  for (const auto& [id, upload] : uploads_) {
    if (!absl::StartsWith(upload.key, ValueOf(request.query, "prefix"))) continue;
    absl::StrAppend(&body, "<Upload><Key>", XmlEscaped(upload.key), "</Key><UploadId>", id,
                    "</UploadId><Initiated>", IsoTime(upload.begun), "</Initiated></Upload>");
  }
  return {.body = body + "<IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"};
}

FakeReply FakeS3::OfUpload(const FakeRequest& request) {
  const std::string id = ValueOf(request.query, "uploadId");
  const auto it = uploads_.find(id);
  if (it == uploads_.end() || it->second.key != request.key) return Error(404, "NoSuchUpload");
  Upload& upload = it->second;
  if (request.method == "PUT") {
    int number = 0;
    (void)absl::SimpleAtoi(ValueOf(request.query, "partNumber"), &number);
    upload.parts[number] = request.body;
    bytes_put_ += static_cast<int64_t>(request.body.size());
    return {.headers = {{"ETag", absl::StrCat("\"", Md5Hex(request.body), "\"")}}};
  }
  if (request.method == "DELETE") {
    uploads_.erase(it);
    return {.status = 204};
  }
  if (request.method == "GET") {
    std::string body = "<ListPartsResult>";
    for (const auto& [number, bytes] : upload.parts) {
      absl::StrAppend(&body, "<Part><PartNumber>", number, "</PartNumber><Size>", bytes.size(),
                      "</Size><ETag>&quot;", Md5Hex(bytes), "&quot;</ETag></Part>");
    }
    return {.body = body + "<IsTruncated>false</IsTruncated></ListPartsResult>"};
  }
  std::string all;
  for (const auto& [number, bytes] : upload.parts) all += bytes;
  const std::string etag = absl::StrCat("\"", Md5Hex(all), "-", upload.parts.size(), "\"");
  objects_[request.key] = {all, absl::Now(), etag};
  uploads_.erase(it);
  return {.body = "<CompleteMultipartUploadResult></CompleteMultipartUploadResult>"};
}

}  // namespace carrel::kvstore
