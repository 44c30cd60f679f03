#include "kvstore/remote/s3_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "common/checksum.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/remote/xml.h"

namespace carrel::kvstore {
namespace {

constexpr absl::Duration kMostSkew = absl::Minutes(15);  // that servers accept
constexpr int64_t kSlowestBytesPerSecond = 256 << 10;

bool IsForNow(int status) {
  return status == 500 || status == 502 || status == 503 || status == 504 || status == 429;
}

absl::Duration RetryAfter(const HttpReply& reply) {
  int seconds = 0;
  if (!absl::SimpleAtoi(reply.Header("retry-after"), &seconds)) return absl::ZeroDuration();
  return absl::Seconds(std::clamp(seconds, 0, 60));
}

// What the server says may hold what was sent.
std::string Scrubbed(std::string text, const Credentials& credentials) {
  for (const std::string* secret : {&credentials.secret_key, &credentials.session_token}) {
    if (!secret->empty()) text = absl::StrReplaceAll(text, {{*secret, "[secret]"}});
  }
  // Of a request's Authorization or URL, which some repeat.
  static const std::string kSignature = "Signature=";
  for (size_t at = 0; (at = text.find(kSignature, at)) != std::string::npos;) {
    const size_t begin = at + kSignature.size();
    at = std::min(text.find_first_not_of("0123456789abcdef", begin), text.size());
    text.replace(begin, at - begin, "[signature]");
    at = begin;
  }
  return text;
}

std::string Base64Sha256(absl::string_view hex) {
  return absl::Base64Escape(absl::HexStringToBytes(hex));
}

absl::StatusOr<ObjectInfo> InfoOf(const HttpReply& reply, const std::string& uri) {
  ObjectInfo info;
  absl::string_view size = reply.Header("content-length");
  const absl::string_view range = reply.Header("content-range");  // "bytes 0-9/100"
  if (reply.status == 206) size = range.substr(std::min(range.find('/'), range.size() - 1) + 1);
  if (range.empty() && reply.status == 206) size = "";
  if (!absl::SimpleAtoi(size, &info.size) || info.size < 0) {
    return absl::DataLossError(absl::StrCat(uri, ": the reply does not say how large it is"));
  }
  info.etag = std::string(reply.Header("etag"));
  info.modified = ReadHttpDate(reply.Header("last-modified")).value_or(absl::InfinitePast());
  info.server_time = ReadHttpDate(reply.Header("date")).value_or(absl::InfinitePast());
  return info;
}

std::string TimeText(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone());
}

// Empty: the clocks agree, as far as the reply says.
std::string Skew(const HttpReply& reply, const S3Error& error) {
  const absl::Time ours = absl::Now();
  const std::optional<absl::Time> theirs = ReadHttpDate(reply.Header("date"));
  const bool apart = theirs.has_value() && absl::AbsDuration(ours - *theirs) > kMostSkew;
  if (error.code != "RequestTimeTooSkewed" && !apart) return "";
  std::string server = error.server_time;
  if (server.empty() && theirs.has_value()) server = TimeText(*theirs);
  return absl::StrCat("the clocks differ: it is ", TimeText(ours), " here and ",
                      server.empty() ? "unknown" : server, " at the server, at most ",
                      absl::FormatDuration(kMostSkew), " are accepted; set this machine's clock");
}

}  // namespace

absl::Status S3Config::Validate() const {
  const auto refuse = [](absl::string_view what, absl::string_view value, absl::string_view must) {
    return absl::InvalidArgumentError(
        absl::StrCat("the bucket's ", what, " \"", Shown(value), "\" must be ", must));
  };
  const auto plain = [](char c) {
    return absl::ascii_islower(static_cast<unsigned char>(c)) ||
           absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '-' || c == '.';
  };
  if (bucket.size() < 3 || bucket.size() > 63 ||
      !std::all_of(bucket.begin(), bucket.end(), plain)) {
    return refuse("name", bucket, "3 to 63 of a-z 0-9 . -");
  }
  if (region.empty() || region.size() > 64 || !std::all_of(region.begin(), region.end(), plain)) {
    return refuse("region", region, "1 to 64 of a-z 0-9 . -");
  }
  if (!endpoint.empty()) {
    absl::string_view host = endpoint;
    const bool scheme =
        absl::ConsumePrefix(&host, "http://") || absl::ConsumePrefix(&host, "https://");
    (void)absl::ConsumeSuffix(&host, "/");
    if (!scheme || host.empty() || host.find_first_of("/?#@ \r\n") != absl::string_view::npos) {
      return refuse("endpoint", ShownUrl(endpoint), "http://HOST[:PORT] or https://HOST[:PORT]");
    }
  }
  if (!encryption.empty() && encryption != "AES256" && encryption != "aws:kms") {
    return refuse("encryption", encryption, "AES256 or aws:kms");
  }
  if (!encryption_key.empty() && encryption != "aws:kms") {
    return refuse("encryption key", encryption_key, "given with aws:kms alone");
  }
  return absl::OkStatus();
}

struct S3Client::Operation {
  std::string method;
  std::string key;  // empty: the bucket itself
  NameValues query = {};
  NameValues headers = {};
  absl::string_view body = {};
  std::string payload = std::string(kEmptyPayload);  // SHA-256 of the body
  std::function<absl::Status(absl::string_view)> sink = nullptr;
  int64_t most_bytes = kMostReplyBytes;
  int64_t moves = 0;  // bytes, for the deadline
  absl::Duration stall = absl::Seconds(30);
  // Before it is tried once more.
  std::function<void(Operation&)> again = nullptr;
  int tried = 0;
};

struct S3Client::Outcome {
  absl::Status status;
  HttpReply reply = {};
  bool retry = false;
  absl::Duration after = absl::ZeroDuration();
};

S3Client::S3Client(S3Config config, std::unique_ptr<CredentialsProvider> credentials,
                   const std::atomic<bool>* cancelled)
    : config_(std::move(config)),
      credentials_(std::move(credentials)),
      cancelled_(cancelled),
      http_(config_.ca_file),
      clock_offset_ms_(absl::ToInt64Milliseconds(absl::Now() - SteadyNow())) {
  std::string endpoint = config_.endpoint;
  if (endpoint.empty()) endpoint = absl::StrCat("https://s3.", config_.region, ".amazonaws.com");
  const size_t scheme = endpoint.find("://") + 3;
  scheme_ = endpoint.substr(0, scheme);
  host_ = std::string(absl::StripSuffix(endpoint.substr(scheme), "/"));
  const absl::string_view usual = scheme_ == "https://" ? ":443" : ":80";
  host_ = std::string(absl::StripSuffix(host_, usual));
  if (!config_.path_style) host_ = absl::StrCat(config_.bucket, ".", host_);
}

absl::StatusOr<std::unique_ptr<S3Client>> S3Client::Create(
    S3Config config, std::unique_ptr<CredentialsProvider> credentials,
    const std::atomic<bool>* cancelled) {
  RETURN_IF_ERROR(config.Validate());
  return std::unique_ptr<S3Client>(
      new S3Client(std::move(config), std::move(credentials), cancelled));
}

std::string S3Client::UriOf(absl::string_view key) const {
  return absl::StrCat("s3://", config_.bucket, "/", Shown(key, 512));
}

absl::Time S3Client::ServerNow() const {
  return SteadyNow() + absl::Milliseconds(clock_offset_ms_.load());
}

RequestToSign S3Client::Unsigned(const Operation& operation) const {
  std::string path = "/";
  if (config_.path_style) absl::StrAppend(&path, config_.bucket);
  if (!operation.key.empty()) {
    absl::StrAppend(&path, config_.path_style ? "/" : "", operation.key);
  }
  return {.method = operation.method,
          .host = host_,
          .path = path,
          .query = operation.query,
          .headers = operation.headers,
          .payload = operation.payload};
}

S3Client::Outcome S3Client::Attempt(const Operation& operation) {
  const absl::StatusOr<Credentials> credentials = credentials_->Get();
  if (!credentials.ok()) {
    return {.status = credentials.status(), .retry = absl::IsUnavailable(credentials.status())};
  }
  RequestToSign request = Unsigned(operation);
  SignRequest(*credentials, {.region = config_.region, .time = absl::Now()}, request);
  bool refused_by_sink = false;
  HttpRequest http{
      .method = request.method,
      .url = absl::StrCat(scheme_, host_, PercentEncoded(request.path, true),
                          request.query.empty() ? "" : "?", CanonicalQuery(request.query)),
      .headers = request.headers,
      .body = operation.body,
      .most_bytes = operation.most_bytes,
      .deadline = absl::Minutes(1) + absl::Seconds(operation.moves / kSlowestBytesPerSecond),
      // Who wants to know soon does not wait for a server that says nothing.
      .stall = std::min(operation.stall, config_.retry.deadline),
      .cancelled = cancelled_};
  if (operation.sink != nullptr) {
    http.sink = [&](absl::string_view bytes) {
      absl::Status status = operation.sink(bytes);
      refused_by_sink |= !status.ok();
      return status;
    };
  }
  absl::StatusOr<HttpReply> reply = http_.Send(http);
  if (!reply.ok()) {
    const bool broke =
        absl::IsUnavailable(reply.status()) || absl::IsDeadlineExceeded(reply.status());
    return {.status = reply.status(), .retry = broke && !refused_by_sink};
  }
  if (const auto date = ReadHttpDate(reply->Header("date")); date.has_value()) {
    clock_offset_ms_ = absl::ToInt64Milliseconds(*date - SteadyNow());
  }
  if (reply->status >= 200 && reply->status < 300) {
    return {.status = absl::OkStatus(), .reply = *std::move(reply)};
  }
  Outcome outcome{.status = Refusal(operation, *reply, *credentials), .after = RetryAfter(*reply)};
  const S3Error error = ReadS3Error(reply->body);
  if (error.code == "ExpiredToken") {
    credentials_->Expired(*credentials);
    const absl::StatusOr<Credentials> others = credentials_->Get();
    outcome.retry = others.ok() && others->session_token != credentials->session_token;
  } else {
    outcome.retry = IsForNow(reply->status) || error.code == "RequestTimeout" ||
                    error.code == "ConditionalRequestConflict" || error.code == "OperationAborted";
  }
  outcome.reply = *std::move(reply);
  return outcome;
}

absl::Status S3Client::Refusal(const Operation& operation, const HttpReply& reply,
                               const Credentials& credentials) const {
  const S3Error error = ReadS3Error(reply.body);
  const std::string what =
      Scrubbed(absl::StrCat(UriOf(operation.key), ": ", operation.method, ": HTTP ", reply.status,
                            error.code.empty() ? "" : " ", error.code,
                            error.message.empty() ? "" : ": ", error.message),
               credentials);
  const int status = reply.status;
  if (status == 412) {
    const bool absent = std::any_of(operation.headers.begin(), operation.headers.end(),
                                    [](const auto& h) { return h.first == "if-none-match"; });
    return absent ? absl::AlreadyExistsError(what) : absl::AbortedError(what);
  }
  if (status == 403 || status == 400) {
    const std::string skew = status == 403 ? Skew(reply, error) : "";
    if (!skew.empty()) return absl::FailedPreconditionError(absl::StrCat(what, ": ", skew));
    for (const char* code : {"ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch",
                             "InvalidToken", "TokenRefreshRequired"}) {
      if (error.code != code) continue;
      return absl::UnauthenticatedError(
          absl::StrCat(what, " (access key ", Shown(credentials.access_key), ")"));
    }
    for (const char* code : {"BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest"}) {
      if (error.code == code) return absl::DataLossError(what);
    }
  }
  const std::string region =
      error.region.empty() ? Shown(reply.Header("x-amz-bucket-region"), 40) : error.region;
  if (!region.empty() && region != config_.region &&
      (status == 301 || status == 307 || status == 400)) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": the bucket is in region ", region, ", not ", config_.region));
  }
  if (IsForNow(status)) return absl::UnavailableError(what);
  if (status == 401 || status == 403) return absl::PermissionDeniedError(what);
  if (status == 404) return absl::NotFoundError(what);
  if (status == 409) return absl::AbortedError(what);
  if (status == 416) return absl::OutOfRangeError(what);
  if (status == 501) return absl::UnimplementedError(what);
  return absl::InternalError(what);
}

absl::StatusOr<HttpReply> S3Client::Call(Operation& operation) {
  Retry retry(config_.retry);
  for (;;) {
    operation.tried = retry.attempt();
    Outcome outcome = Attempt(operation);
    if (outcome.status.ok()) return std::move(outcome.reply);
    if (!outcome.retry || !retry.Wait(outcome.after, cancelled_)) {
      if (cancelled_ != nullptr && *cancelled_) return absl::CancelledError("cancelled");
      if (operation.tried == 1) return outcome.status;
      return absl::Status(outcome.status.code(), absl::StrCat(outcome.status.message(), " (tried ",
                                                              operation.tried, " times)"));
    }
    if (operation.again != nullptr) operation.again(operation);
  }
}

absl::StatusOr<ObjectInfo> S3Client::Head(const std::string& key) {
  Operation operation{.method = "HEAD", .key = key};
  ASSIGN_OR_RETURN(const HttpReply reply, Call(operation));
  return InfoOf(reply, UriOf(key));
}

absl::StatusOr<ObjectInfo> S3Client::Get(
    const std::string& key, ObjectRange range,
    const std::function<absl::Status(absl::string_view)>& sink) {
  int64_t given = 0;
  const int64_t wanted = range.end < 0 ? -1 : range.end - range.begin;
  const bool ranged = range.begin > 0 || wanted >= 0;
  Operation operation{
      .method = "GET", .key = key, .most_bytes = 0, .moves = std::max<int64_t>(wanted, 0)};
  if (wanted < 0) operation.moves = int64_t{1} << 40;
  const auto set_range = [&](Operation& o) {
    o.headers.clear();
    if (!ranged && given == 0) return;
    std::string text = absl::StrCat("bytes=", range.begin + given, "-");
    if (wanted >= 0) absl::StrAppend(&text, range.end - 1);
    o.headers.emplace_back("range", text);
  };
  set_range(operation);
  if (wanted == 0) return Head(key);
  operation.again = set_range;
  operation.sink = [&](absl::string_view bytes) -> absl::Status {
    if (wanted >= 0 && given + static_cast<int64_t>(bytes.size()) > wanted) {
      return absl::DataLossError(
          absl::StrCat("the server gives more than the ", wanted, " bytes asked for"));
    }
    RETURN_IF_ERROR(sink(bytes));
    given += static_cast<int64_t>(bytes.size());
    return absl::OkStatus();
  };
  const absl::StatusOr<HttpReply> reply = Call(operation);
  if (absl::IsOutOfRange(reply.status())) {
    return absl::DataLossError(
        absl::StrCat(reply.status().message(), ": it ends before byte ", range.begin + given));
  }
  RETURN_IF_ERROR(reply.status());
  ASSIGN_OR_RETURN(ObjectInfo info, InfoOf(*reply, UriOf(key)));
  const int64_t all = wanted >= 0 ? wanted : info.size - range.begin;
  if (given != all) {
    return absl::DataLossError(absl::StrCat(UriOf(key), ": bytes from ", range.begin,
                                            " on: ", given, " came, ", all,
                                            " were expected (the object has ", info.size, ")"));
  }
  return info;
}

absl::StatusOr<std::string> S3Client::Read(const std::string& key, int64_t most_bytes,
                                           ObjectInfo* info) {
  Operation operation{.method = "GET", .key = key, .most_bytes = most_bytes, .moves = most_bytes};
  absl::StatusOr<HttpReply> reply = Call(operation);
  if (absl::IsResourceExhausted(reply.status())) return Annotate(reply.status(), UriOf(key));
  RETURN_IF_ERROR(reply.status());
  if (info != nullptr) {
    ASSIGN_OR_RETURN(*info, InfoOf(*reply, UriOf(key)));
  }
  return std::move(reply->body);
}

void S3Client::AddEncryption(NameValues& headers) const {
  if (config_.encryption.empty()) return;
  headers.emplace_back("x-amz-server-side-encryption", config_.encryption);
  if (config_.encryption_key.empty()) return;
  headers.emplace_back("x-amz-server-side-encryption-aws-kms-key-id", config_.encryption_key);
}

absl::StatusOr<std::string> S3Client::Put(const std::string& key, absl::string_view bytes,
                                          const Condition& condition, const std::string& sha256) {
  Operation operation{.method = "PUT",
                      .key = key,
                      .body = bytes,
                      .payload = sha256.empty() ? Sha256Hex(bytes) : sha256,
                      .moves = static_cast<int64_t>(bytes.size()),
                      .stall = absl::Seconds(60)};
  operation.headers.emplace_back("x-amz-checksum-sha256", Base64Sha256(operation.payload));
  if (condition.absent) operation.headers.emplace_back("if-none-match", "*");
  if (!condition.etag.empty()) operation.headers.emplace_back("if-match", condition.etag);
  AddEncryption(operation.headers);
  const absl::StatusOr<HttpReply> reply = Call(operation);
  const bool refused = absl::IsAlreadyExists(reply.status()) || absl::IsAborted(reply.status());
  if (refused && operation.tried > 1) {  // an attempt whose reply was lost may have done it
    ObjectInfo info;
    const absl::StatusOr<std::string> there = Read(key, static_cast<int64_t>(bytes.size()), &info);
    if (there.ok() && *there == bytes) return info.etag;
  }
  RETURN_IF_ERROR(reply.status());
  return std::string(reply->Header("etag"));
}

absl::Status S3Client::Remove(const std::string& key, const Condition& condition) {
  Operation operation{.method = "DELETE", .key = key};
  if (!condition.etag.empty()) operation.headers.emplace_back("if-match", condition.etag);
  absl::Status status = Call(operation).status();
  if (absl::IsUnimplemented(status) && !condition.etag.empty()) {
    operation.headers.clear();
    status = Call(operation).status();
  }
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<ObjectPage> S3Client::List(const std::string& prefix, const std::string& token,
                                          const std::string& delimiter, int most) {
  Operation operation{
      .method = "GET",
      .key = "",
      .query = {{"list-type", "2"}, {"prefix", prefix}, {"max-keys", absl::StrCat(most)}}};
  if (!token.empty()) operation.query.emplace_back("continuation-token", token);
  if (!delimiter.empty()) operation.query.emplace_back("delimiter", delimiter);
  ASSIGN_OR_RETURN(const HttpReply reply, Call(operation));
  absl::StatusOr<ObjectPage> page = ReadObjectPage(reply.body);
  if (!page.ok()) return Annotate(page.status(), UriOf(prefix));
  return page;
}

absl::Status S3Client::ForEach(const std::string& prefix,
                               const std::function<absl::Status(const ListedObject&)>& each) {
  std::string token;
  do {
    ASSIGN_OR_RETURN(const ObjectPage page, List(prefix, token));
    for (const ListedObject& object : page.objects) RETURN_IF_ERROR(each(object));
    if (page.next == token && !token.empty()) {
      return absl::DataLossError(absl::StrCat(UriOf(prefix), ": the list does not go on"));
    }
    token = page.next;
  } while (!token.empty());
  return absl::OkStatus();
}

absl::StatusOr<std::string> S3Client::BeginUpload(const std::string& key) {
  Operation operation{.method = "POST", .key = key, .query = {{"uploads", ""}}};
  operation.headers.emplace_back("x-amz-checksum-algorithm", "SHA256");
  AddEncryption(operation.headers);
  ASSIGN_OR_RETURN(const HttpReply reply, Call(operation));
  absl::StatusOr<std::string> id = ReadUploadId(reply.body);
  if (!id.ok()) return Annotate(id.status(), UriOf(key));
  return id;
}

absl::StatusOr<UploadedPart> S3Client::UploadPart(const std::string& key, const std::string& upload,
                                                  int number, absl::string_view bytes) {
  Operation operation{.method = "PUT",
                      .key = key,
                      .query = {{"partNumber", absl::StrCat(number)}, {"uploadId", upload}},
                      .body = bytes,
                      .payload = Sha256Hex(bytes),
                      .moves = static_cast<int64_t>(bytes.size()),
                      .stall = absl::Seconds(60)};
  UploadedPart part{.number = number, .sha256 = Base64Sha256(operation.payload)};
  operation.headers.emplace_back("x-amz-checksum-sha256", part.sha256);
  ASSIGN_OR_RETURN(const HttpReply reply, Call(operation));
  part.etag = std::string(reply.Header("etag"));
  if (part.etag.empty()) {
    return absl::DataLossError(absl::StrCat(UriOf(key), ": part ", number, " got no ETag"));
  }
  return part;
}

absl::Status S3Client::CompleteUpload(const std::string& key, const std::string& upload,
                                      const std::vector<UploadedPart>& parts) {
  std::string body = "<CompleteMultipartUpload>";
  for (const UploadedPart& part : parts) {
    absl::StrAppend(&body, "<Part><PartNumber>", part.number, "</PartNumber><ETag>",
                    XmlEscaped(part.etag), "</ETag><ChecksumSHA256>", XmlEscaped(part.sha256),
                    "</ChecksumSHA256></Part>");
  }
  body += "</CompleteMultipartUpload>";
  Operation operation{.method = "POST",
                      .key = key,
                      .query = {{"uploadId", upload}},
                      .body = body,
                      .payload = Sha256Hex(body),
                      .moves = int64_t{256} << 20,
                      .stall = absl::Minutes(5)};
  operation.headers.emplace_back("content-type", "application/xml");
  ASSIGN_OR_RETURN(const HttpReply reply, Call(operation));
  // A completion that takes long begins with 200 and says later that it failed.
  const S3Error error = ReadS3Error(reply.body);
  if (error.code.empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(UriOf(key), ": completing its upload: ", error.code, ": ", error.message));
}

absl::Status S3Client::AbortUpload(const std::string& key, const std::string& upload) {
  Operation operation{.method = "DELETE", .key = key, .query = {{"uploadId", upload}}};
  const absl::Status status = Call(operation).status();
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<std::vector<ListedUpload>> S3Client::ListUploads(const std::string& prefix) {
  std::vector<ListedUpload> uploads;
  std::string next_key, next_id;
  do {
    Operation operation{.method = "GET", .key = "", .query = {{"uploads", ""}, {"prefix", prefix}}};
    if (!next_key.empty()) operation.query.emplace_back("key-marker", next_key);
    if (!next_id.empty()) operation.query.emplace_back("upload-id-marker", next_id);
    ASSIGN_OR_RETURN(const HttpReply reply, Call(operation));
    absl::StatusOr<UploadPage> page = ReadUploadPage(reply.body);
    if (!page.ok()) return Annotate(page.status(), UriOf(prefix));
    for (ListedUpload& upload : page->uploads) {
      if (absl::StartsWith(upload.key, prefix)) uploads.push_back(std::move(upload));
    }
    if (page->next_key == next_key && page->next_id == next_id && !next_key.empty()) break;
    next_key = page->next_key;
    next_id = page->next_id;
  } while (!next_key.empty());
  return uploads;
}

absl::StatusOr<std::vector<ListedPart>> S3Client::ListParts(const std::string& key,
                                                            const std::string& upload) {
  std::vector<ListedPart> parts;
  std::string next;
  do {
    Operation operation{.method = "GET", .key = key, .query = {{"uploadId", upload}}};
    if (!next.empty()) operation.query.emplace_back("part-number-marker", next);
    ASSIGN_OR_RETURN(const HttpReply reply, Call(operation));
    absl::StatusOr<PartPage> page = ReadPartPage(reply.body);
    if (!page.ok()) return Annotate(page.status(), UriOf(key));
    parts.insert(parts.end(), page->parts.begin(), page->parts.end());
    if (page->next == next && !next.empty()) break;
    next = page->next;
  } while (!next.empty());
  return parts;
}

absl::StatusOr<std::string> S3Client::Presign(const std::string& method, const std::string& key,
                                              absl::Duration valid) {
  if (valid < absl::Seconds(1) || valid > absl::Hours(24 * 7)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a presigned URL that is valid for ", absl::FormatDuration(valid), ", must be 1s to 168h"));
  }
  ASSIGN_OR_RETURN(const Credentials credentials, credentials_->Get());
  Operation operation{.method = method, .key = key};
  return scheme_ + PresignedUrl(credentials, {.region = config_.region, .time = absl::Now()}, valid,
                                Unsigned(operation));
}

}  // namespace carrel::kvstore
