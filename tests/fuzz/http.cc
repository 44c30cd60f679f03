// What HTTP brings: bodies of requests, targets and hosts; whole requests against a server in this process, with the
// demo model behind it; and what a client of ours reads from a server.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "common/json.h"
#include "common/test_folders.h"
#include "http_api/api_client.h"
#include "http_api/api_error.h"
#include "http_api/api_service.h"
#include "http_api/completion.h"
#include "http_api/document_body.h"
#include "http_api/http_message.h"
#include "kvstore/access/access.h"
#include "nlohmann/json.hpp"
#include "serving/stop_filter.h"
#include "tests/fuzz/target.h"

namespace carrel::fuzz {
namespace {

using namespace carrel::http_api;  // NOLINT: all of this file is about it

// --- bodies

void CheckError(const absl::Status& status) {
  const HttpError error = ErrorOf(status);
  CARREL_FUZZ_CHECK(error.status >= 400 && error.status != 500);
  CARREL_FUZZ_CHECK(error.body.size() < 8000);
  CARREL_FUZZ_CHECK(ParseJson(error.body, "ours").ok());
}

void RunCompletion(absl::string_view bytes) {
  const bool chat = absl::ConsumePrefix(&bytes, "c");
  const absl::StatusOr<CompletionRequest> request = ParseCompletion(chat, bytes);
  if (!request.ok()) return CheckError(request.status());
  CARREL_FUZZ_CHECK(request->max_tokens >= 1 && request->stop.size() <= 16);
  CARREL_FUZZ_CHECK(request->model.size() <= 256 && request->context.size() <= 256);
  (void)DocumentPart(*request);
  serving::StopFilter filter(request->stop);
  std::string out = filter.Push(request->prompt.substr(0, 1000));
  out += filter.Finish();
  CARREL_FUZZ_CHECK(ParseJson(CompletionJson({.chat = chat}, out, "stop", {}, {}), "ours").ok());
}

std::vector<std::string> CompletionSeeds() {
  return {
      R"({"model":"m@c","prompt":"a","max_tokens":8.0,"stop":["x","yy"],"stream":true,)"
      R"("stream_options":{"include_usage":true},"temperature":0.5,"top_p":0.9,"seed":1,"top_k":3})",
      R"(c{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text",)"
      R"("text":"t"}]}],"tools":[],"response_format":{"type":"text"},"n":1,"sources":2,"wait":1,)"
      R"("chat_template_kwargs":{"enable_thinking":false},"logit_bias":{},"user":"u"})",
      R"({"prompt":["a"],"context":"c","suffix":"","echo":false,"max_tokens":-1,"best_of":1})"};
}

CARREL_FUZZ_TARGET(http_completion, RunCompletion, CompletionSeeds);

void RunDocument(absl::string_view bytes) {
  const auto [head, body] = SplitAtNul(bytes);
  HttpRequest request;
  request.method = "POST";
  const size_t line = head.find('\n');
  request.content_type = std::string(head.substr(0, line));
  request.body = std::string(body);
  const std::string query(line == absl::string_view::npos ? "" : head.substr(line + 1));
  const absl::StatusOr<GivenDocument> given = ReadDocument(request, query);
  if (!given.ok()) CheckError(given.status());
}

std::vector<std::string> DocumentSeeds() {
  const std::string nul(1, '\0');
  return {"text/plain; charset=utf-8\nname=a&chat=false" + nul + "The pier is long.",
          "application/json\n" + nul + R"({"name":"a","text":"The pier is long.","chat":true})",
          "text/plain; charset=utf-16\n" + nul + std::string("\xff\xfeT\0h\0e\0", 8),
          "multipart/form-data; boundary=x\n" + nul +
              "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\n"
              "Content-Type: text/plain\r\n\r\nThe pier.\r\n--x--\r\n",
          "text/html\n" + nul + "<p>The pier</p>",
          "application/pdf\n" + nul + "%PDF-1.4 x"};
}

CARREL_FUZZ_TARGET(http_document, RunDocument, DocumentSeeds);

void RunTarget(absl::string_view bytes) {
  const auto [target, host] = SplitAtNul(bytes);
  (void)IsLocalHostOrAddress(host);
  CARREL_FUZZ_CHECK(!SameAuthority(host, "carrel.example") || !IsLocalHostOrAddress(host));
  const absl::StatusOr<HttpTarget> at = ParseTarget(target);
  if (!at.ok()) return;
  (void)QueryParameter(at->query, "name");
  for (const char* method : {"GET", "HEAD", "POST", "DELETE", "OPTIONS"}) {
    const RouteFound found = FindRoute(method, at->segments);
    CARREL_FUZZ_CHECK(found.route == nullptr || !found.allow.empty());
  }
}

std::vector<std::string> TargetSeeds() {
  const std::string nul(1, '\0');
  return {"/v1/contexts/a%20b/text?name=x%41+y&chat=true" + nul + "localhost:8080",
          "http://127.0.0.1:80/v1/models/" + nul + "[::1]:80", "//v1//models#x" + nul + "10.0.0.1"};
}

CARREL_FUZZ_TARGET(http_target, RunTarget, TargetSeeds);

// --- whole requests

// As a stranger: who comes over a Unix socket would add and delete.
int ConnectTo(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CARREL_FUZZ_CHECK(fd >= 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  name.sin_port = htons(static_cast<uint16_t>(port));
  CARREL_FUZZ_CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0);
  timeval patience = {20, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  return fd;
}

// What comes until the end, or until the other side says nothing for long.
std::string Exchange(int port, absl::string_view bytes) {
  const int fd = ConnectTo(port);
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) break;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  shutdown(fd, SHUT_WR);
  std::string all;
  char part[4096];
  for (ssize_t got; (got = recv(fd, part, sizeof(part), 0)) > 0;) {
    all.append(part, static_cast<size_t>(got));
  }
  close(fd);
  // Interim responses: the server asks whether who sends nothing more still reads.
  absl::string_view rest = all;
  while (absl::ConsumePrefix(&rest, "HTTP/1.1 100 Continue\r\n\r\n")) {
  }
  return std::string(rest);
}

// The port of a service with the demo model and a store.
int TheService() {
  static const int port = [] {
    WriteInput("api/empty", "");
    ApiConfig config;
    config.model_name = "demo";
    config.http.listen = {"127.0.0.1:0"};
    config.access = kvstore::Access::Open(/*everything=*/false);
    config.engine.scheduler.decoders.folder = config.engine.documents->address.folder =
        Folder() + "/api/store";
    config.engine.documents->max_queued = 1;
    library::StoreAddress address;
    address.folder = Folder() + "/api/store";
    auto store = library::StoreAccess::Open(address, kvstore::StoreMode::kReadWrite);
    CARREL_FUZZ_CHECK(store.ok());
    auto model = library::LoadedModel::Load(SourceFolder() + "/models/demo", "", 1);
    CARREL_FUZZ_CHECK(model.ok());
    auto service = ApiService::Start(config, *model, *std::move(store));
    CARREL_FUZZ_CHECK(service.ok());
    const std::string bound_at = (*service)->addresses()[0];
    int bound = 0;
    CARREL_FUZZ_CHECK(absl::SimpleAtoi(bound_at.substr(bound_at.rfind(':') + 1), &bound));
    service->release();  // as long as the process
    return bound;
  }();
  return port;
}

void RunRequest(absl::string_view bytes) {
  std::string said = Exchange(TheService(), bytes);
  // Every answer that begins is one that a client may have for these bytes.
  absl::string_view left = said;
  if (absl::ConsumePrefix(&left, "HTTP/1.1 ")) {
    int status = 0;
    CARREL_FUZZ_CHECK(absl::SimpleAtoi(left.substr(0, 3), &status));
    CARREL_FUZZ_CHECK(status < 500 || status == 501 || status == 503 || status == 504 ||
                      status == 507);
  } else {
    CARREL_FUZZ_CHECK(left.empty());
  }
  const std::string health =
      Exchange(TheService(), "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
  CARREL_FUZZ_CHECK(health.rfind("HTTP/1.1 200", 0) == 0);
}

std::vector<std::string> RequestSeeds() {
  const auto post = [](const std::string& target, const std::string& body,
                       const std::string& more = "") {
    return absl::StrCat("POST ", target,
                        " HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: ", body.size(),
                        "\r\nContent-Type: application/json\r\n", more, "\r\n", body);
  };
  return {"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
          "HEAD /?x HTTP/1.0\r\n\r\n",
          "OPTIONS /v1/contexts HTTP/1.1\r\nHost: a\r\nOrigin: http://b\r\n\r\n",
          "GET /v1/contexts/none/events HTTP/1.1\r\nHost: [::1]:8\r\nConnection: close\r\n\r\n",
          post("/v1/completions", R"({"prompt":"a","max_tokens":1,"stream":true})"),
          post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}]})",
               "Expect: 100-continue\r\n"),
          post("/v1/contexts", R"({"name":"..","text":"x"})", "Authorization: Bearer y\r\n"),
          "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
          "f;a=b\r\n{\"prompt\":\"abcd\"\r\n18\r\n,\"max_tokens\":1}        \r\n0\r\nX: y\r\n\r\n"};
}

CARREL_FUZZ_TARGET(http_request, RunRequest, RequestSeeds);

// --- what a client of ours reads

// Answers each connection with the same bytes and closes it.
class Parrot {
 public:
  Parrot() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CARREL_FUZZ_CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0);
    CARREL_FUZZ_CHECK(listen(listener_, 16) == 0);
    socklen_t size = sizeof(name);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&name), &size);
    url_ = absl::StrCat("http://127.0.0.1:", ntohs(name.sin_port));
    std::thread([this] { Work(); }).detach();
  }
  const std::string& url() const { return url_; }
  void Say(absl::string_view bytes) {
    absl::MutexLock lock(&mutex_);
    bytes_ = std::string(bytes);
  }

 private:
  void Work() {
    for (;;) {
      const int fd = accept(listener_, nullptr, nullptr);
      if (fd < 0) continue;
      char part[4096];
      (void)!recv(fd, part, sizeof(part), 0);
      // A client may have left before it read all of this, and the next input be there already.
      const std::string bytes = Bytes();
      (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      shutdown(fd, SHUT_WR);
      timeval patience = {1, 0};
      setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
      while (recv(fd, part, sizeof(part), 0) > 0) {
      }
      close(fd);
    }
  }
  std::string Bytes() {
    absl::MutexLock lock(&mutex_);
    return bytes_;
  }

  const int listener_;
  std::string url_;
  absl::Mutex mutex_;
  std::string bytes_ ABSL_GUARDED_BY(mutex_);
};

void RunAnswer(absl::string_view bytes) {
  static Parrot& parrot = *new Parrot();
  parrot.Say(bytes);
  const absl::StatusOr<ApiClient> client = ApiClient::Create(parrot.url());
  CARREL_FUZZ_CHECK(client.ok());
  const absl::StatusOr<std::string> whole = client->Call("/v1/models", "");
  if (whole.ok()) (void)ParseJsonObject(*whole, "the server's answer", kMessageBounds);
  int events = 0;
  (void)client->Stream("/v1/completions", "{}", [&](absl::string_view data) -> absl::Status {
    ++events;
    const auto event = ParseJsonObject(data, "an event", kMessageBounds);
    if (!event.ok()) return event.status();
    (void)JsonText(JsonAt(*event, {"choices", "0", "delta", "content"}));
    (void)JsonInt(JsonAt(*event, {"usage", "prompt_tokens"}));
    return absl::OkStatus();
  });
  CARREL_FUZZ_CHECK(events <= 1000000);
}

std::vector<std::string> AnswerSeeds() {
  return {
      "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 27\r\n\r\n"
      "{\"data\":[{\"id\":\"m\"}],\"x\":1}",
      "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
      "2c\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\r\n\r\n"
      "10\r\n\n\ndata: [DONE]\n\n\r\n0\r\n\r\n",
      "HTTP/1.1 404 Not Found\r\nContent-Length: 31\r\n\r\n"
      "{\"error\":{\"message\":\"no model\"}}"};
}

CARREL_FUZZ_TARGET(http_answer, RunAnswer, AnswerSeeds);

}  // namespace
}  // namespace carrel::fuzz
