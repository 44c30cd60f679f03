#include "kvstore/remote/http_client.h"

#include <curl/curl.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/http_proxy.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

constexpr size_t kMostIdle = 16;
constexpr int64_t kMostHeaderBytes = 64 << 10;

void InitCurl() {
  static std::once_flag once;
  std::call_once(once, [] { CARREL_CHECK(curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK); });
}

// What the callbacks of one request write to.
struct Transfer {
  const HttpRequest& request;
  HttpReply reply;
  int64_t header_bytes = 0;
  absl::Status failed;  // by us: the transfer was ended
};

size_t OnHeader(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const absl::string_view line = absl::StripAsciiWhitespace({data, size * count});
  transfer.header_bytes += static_cast<int64_t>(size * count);
  if (transfer.header_bytes > kMostHeaderBytes) {
    transfer.failed = absl::ResourceExhaustedError(
        absl::StrCat("the reply has more than ", kMostHeaderBytes, " bytes of headers"));
    return 0;
  }
  if (absl::StartsWith(line, "HTTP/")) {  // a final reply begins anew after an interim one
    transfer.reply.headers.clear();
    const size_t space = line.find(' ');
    int status = 0;
    if (space != absl::string_view::npos) {
      (void)absl::SimpleAtoi(line.substr(space + 1, 3), &status);
    }
    transfer.reply.status = status;
  } else if (const size_t colon = line.find(':'); colon != absl::string_view::npos) {
    transfer.reply.headers.emplace_back(
        absl::AsciiStrToLower(line.substr(0, colon)),
        std::string(absl::StripAsciiWhitespace(line.substr(colon + 1))));
  }
  return size * count;
}

size_t OnBody(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const absl::string_view bytes(data, size * count);
  const bool good = transfer.reply.status >= 200 && transfer.reply.status < 300;
  if (good && transfer.request.sink != nullptr) {
    transfer.failed = transfer.request.sink(bytes);
    return transfer.failed.ok() ? bytes.size() : 0;
  }
  const int64_t most = good ? transfer.request.most_bytes : kMostReplyBytes;
  if (static_cast<int64_t>(transfer.reply.body.size() + bytes.size()) > most) {
    transfer.failed =
        absl::ResourceExhaustedError(absl::StrCat("the reply has more than ", most, " bytes"));
    return 0;
  }
  transfer.reply.body.append(bytes.data(), bytes.size());
  return bytes.size();
}

int OnProgress(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  const auto& transfer = *static_cast<Transfer*>(user);
  const std::atomic<bool>* cancelled = transfer.request.cancelled;
  return cancelled != nullptr && *cancelled ? 1 : 0;
}

bool HasBody(const HttpRequest& request) {
  return request.method == "PUT" || request.method == "POST";
}

curl_slist* HeaderList(const HttpRequest& request) {
  curl_slist* list = nullptr;
  bool typed = false;
  for (const auto& [name, value] : request.headers) {
    typed |= name == "content-type";
    // "name;" is curl's way to send a header that is empty.
    const std::string line = value.empty() ? name + ";" : absl::StrCat(name, ": ", value);
    list = curl_slist_append(list, line.c_str());
  }
  list = curl_slist_append(list, "expect:");  // "name:" its way to send none
  return HasBody(request) && !typed ? curl_slist_append(list, "content-type:") : list;
}

// Nothing for this machine, or for its metadata service, goes through a proxy.
bool GoesPastProxies(absl::string_view url) {
  const size_t scheme = url.find("://");
  if (scheme == absl::string_view::npos) return false;
  absl::string_view host = url.substr(scheme + 3);
  host = host.substr(0, host.find('/'));
  const size_t port = host.rfind(':');
  if (port != absl::string_view::npos && port > host.rfind(']') + 1) host = host.substr(0, port);
  return IsLoopbackHost(absl::StripSuffix(absl::StripPrefix(host, "["), "]")) ||
         host == "169.254.169.254";
}

long Milliseconds(absl::Duration duration) {
  return static_cast<long>(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, int64_t{1} << 30));
}

void SetUp(CURL* curl, Transfer& transfer) {
  const HttpRequest& request = transfer.request;
  curl_easy_setopt(curl, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_PATH_AS_IS, 1L);
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_HTTP_VERSION, CURL_HTTP_VERSION_1_1);
  curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 256L << 10);
  curl_easy_setopt(curl, CURLOPT_UPLOAD_BUFFERSIZE, 256L << 10);
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS,
                   std::min(10000L, static_cast<long>(Milliseconds(request.stall))));
  curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, Milliseconds(request.deadline));
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, std::max(1L, Milliseconds(request.stall) / 1000));
  curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, OnHeader);
  curl_easy_setopt(curl, CURLOPT_HEADERDATA, &transfer);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, OnBody);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &transfer);
  curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, OnProgress);
  curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &transfer);
  if (GoesPastProxies(request.url)) curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
  if (request.method == "HEAD") {
    curl_easy_setopt(curl, CURLOPT_NOBODY, 1L);
    return;
  }
  if (HasBody(request)) {
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE,
                     static_cast<curl_off_t>(request.body.size()));
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, request.body.empty() ? "" : request.body.data());
  }
  curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request.method.c_str());
}

absl::Status StatusOf(CURLcode code, const char* detail, const Transfer& transfer) {
  if (!transfer.failed.ok()) return transfer.failed;
  const std::string why = *detail != '\0' ? detail : curl_easy_strerror(code);
  switch (code) {
    case CURLE_ABORTED_BY_CALLBACK:
      return absl::CancelledError("cancelled");
    case CURLE_OPERATION_TIMEDOUT:
      return absl::DeadlineExceededError(why);
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_SSL_CERTPROBLEM:
      return absl::PermissionDeniedError(absl::StrCat("TLS: ", why));
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
      return absl::InvalidArgumentError(why);
    case CURLE_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(why);
    default:
      return absl::UnavailableError(why);
  }
}

}  // namespace

HttpClient::HttpClient(std::string ca_file) : ca_file_(std::move(ca_file)) { InitCurl(); }

HttpClient::Handle HttpClient::Take() {
  absl::MutexLock lock(&mu_);
  if (idle_.empty()) {
    Handle handle(curl_easy_init(), curl_easy_cleanup);
    CARREL_CHECK(handle != nullptr);
    return handle;
  }
  Handle handle = std::move(idle_.back());
  idle_.pop_back();
  return handle;
}

void HttpClient::GiveBack(Handle handle) {
  curl_easy_reset(handle.get());  // keeps its connections
  absl::MutexLock lock(&mu_);
  if (idle_.size() < kMostIdle) idle_.push_back(std::move(handle));
}

absl::StatusOr<HttpReply> HttpClient::Send(const HttpRequest& request) {
  Handle handle = Take();
  Transfer transfer{.request = request};
  char detail[CURL_ERROR_SIZE] = "";
  curl_slist* const headers = HeaderList(request);
  const absl::Cleanup free_headers = [headers] { curl_slist_free_all(headers); };
  curl_easy_setopt(handle.get(), CURLOPT_HTTPHEADER, headers);
  curl_easy_setopt(handle.get(), CURLOPT_ERRORBUFFER, detail);
  if (!ca_file_.empty()) curl_easy_setopt(handle.get(), CURLOPT_CAINFO, ca_file_.c_str());
  SetUp(handle.get(), transfer);
  const CURLcode code = curl_easy_perform(handle.get());
  const absl::Status status =
      code == CURLE_OK ? absl::OkStatus() : StatusOf(code, detail, transfer);
  GiveBack(std::move(handle));
  if (!status.ok()) {
    return Annotate(status, absl::StrCat(request.method, " ", ShownUrl(request.url)));
  }
  return std::move(transfer.reply);
}

absl::string_view HttpReply::Header(absl::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return "";
}

std::string ShownUrl(absl::string_view url) {
  return Shown(url.substr(0, url.find_first_of("?#")), 512);
}

}  // namespace carrel::kvstore
