// What:   one connection of the HTTP server: reads requests, judges them by their headers, hands them over, writes
//         their replies. Private to http_server.cc.
// Threads: all of it runs on the server's thread, but for what says otherwise.
// Ownership: keeps a pointer to what all connections share, which outlives it.
#pragma once

#include <atomic>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/byte_budget.h"
#include "common/thrown.h"
#include "http_api/http_server.h"

namespace carrel::http_api {

// A body of bytes that grows as they come: the length that is announced takes no memory.
struct GrowingBody {
  using value_type = std::string;
  class reader {
   public:
    template <bool kRequest, class Fields>
    reader(boost::beast::http::header<kRequest, Fields>&, value_type& body) : body_(body) {}
    void init(const boost::optional<uint64_t>&, boost::system::error_code& error) { error = {}; }
    template <class Buffers>
    size_t put(const Buffers& buffers, boost::system::error_code& error) {
      error = {};
      size_t bytes = 0;
      for (auto it = boost::asio::buffer_sequence_begin(buffers);
           it != boost::asio::buffer_sequence_end(buffers); ++it) {
        const boost::asio::const_buffer part = *it;
        body_.append(static_cast<const char*>(part.data()), part.size());
        bytes += part.size();
      }
      return bytes;
    }
    void finish(boost::system::error_code& error) { error = {}; }

   private:
    value_type& body_;
  };
};

// Of the server and its connections, of which a reply may keep one longer than the server lives.
struct HttpShared {
  // Its end drops what is posted, or waits for a socket: those hold their connections, which hold it.
  struct Io : boost::asio::io_context {
    using boost::asio::io_context::io_context;
    void End() { shutdown(); }
  };

  HttpShared(const HttpServerConfig& given, HttpGate a_gate, HttpHandler a_handler)
      : config(given),
        gate(std::move(a_gate)),
        handler(std::move(a_handler)),
        budget(given.budget_bytes) {}

  // After it nothing is posted any more. The server's thread has ended.
  void End() {
    {
      absl::MutexLock lock(&mu);
      ended = true;
    }
    io.End();
  }
  template <typename F>
  void Post(F work) {
    absl::ReaderMutexLock lock(&mu);
    if (!ended) boost::asio::post(io, std::move(work));
  }

  Io io{1};  // destroyed last
  absl::Mutex mu;
  bool ended ABSL_GUARDED_BY(mu) = false;
  const HttpServerConfig config;
  const HttpGate gate;
  const HttpHandler handler;
  ByteBudget budget;
  std::atomic<int64_t> connections{0}, evicted{0}, slow{0}, requests{0};
  std::atomic<int64_t> long_answers{0};  // on their way, of those that may take long
  int64_t most_long = INT64_MAX;         // set before the first connection
  std::atomic<bool> stopped{false};
};

class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;
  using Clock = std::chrono::steady_clock;
  enum class State : uint8_t {
    kDraining = 0,
    kHeader = 1,
    kWaiting = 2,
    kBody = 3,
    kAnswering = 4
  };

  // local: a Unix socket.
  HttpConnection(Socket socket, bool local, std::shared_ptr<HttpShared> shared);
  ~HttpConnection();

  void Start() { WaitForRequest(); }

  // Of one reply; `turn` tells replies to earlier requests from the one that is wanted.
  void Send(int64_t turn, int status, const std::string& content_type, std::string body,
            const HttpFields& fields);
  void Begin(int64_t turn, const std::string& content_type);
  void Write(int64_t turn, std::string piece);
  void End(int64_t turn);

  // --- any thread
  // Notes a piece that is on its way; false: the client is too slow, and is left.
  bool Announce(size_t bytes);
  bool gone() const { return gone_ || shared_->stopped; }
  HttpShared& shared() { return *shared_; }

  // Of the server's thread: what is thrown ends the connection, since no answer would come.
  template <typename F>
  void Guarded(F work) {
    const absl::Status done = CatchThrown("a connection", [&] {
      work();
      return absl::OkStatus();
    });
    if (!done.ok()) Leave();
  }

  State state() const { return state_; }
  Clock::time_point since() const { return since_; }
  void Leave();

 private:
  void WaitForRequest();
  void ReadSome();
  void ReadEnded(boost::system::error_code error);
  void Feed();
  // False: the request was refused, or the client too slow.
  bool Judge();
  bool TakeBody();
  HttpRequest Head();
  void Handle();
  // An answer that may take long takes a place; false: there is none.
  bool TakePlace();
  void GivePlaceBack();
  void Broken(boost::system::error_code error);
  void Refuse(const HttpVerdict& verdict);
  void RefuseWith(int status, const std::string& message, HttpFields fields = {});
  void StartTurn(bool keep_alive);
  void Watch();
  void SeenEnd();
  void AskWhetherThere();
  void Probe();
  bool Dead();
  bool Ended();
  void Push(std::string bytes);
  void PushPiece(const std::string& piece);
  void Pump();
  void Pumped(size_t bytes);  // so many of the first of out_ are written
  void Next();
  void Drain(int64_t left);
  void SetState(State state);
  void SetDeadline(Clock::duration after);

  const std::shared_ptr<HttpShared> shared_;  // before what stands on its io
  Socket socket_;
  const bool local_;
  boost::asio::steady_timer deadline_, probe_;
  boost::beast::flat_buffer buffer_;
  std::optional<boost::beast::http::request_parser<GrowingBody>> parser_;
  HttpRequest request_;          // its head, once the headers have come
  std::deque<std::string> out_;  // the first is on its way
  size_t written_ = 0;           // bytes of the first
  std::string peer_;
  std::optional<uint32_t> uid_;
  State state_ = State::kWaiting;
  Clock::time_point since_ = Clock::now();
  int64_t turn_ = 0;
  int64_t body_limit_ = 0;
  bool first_ = true;
  bool judged_ = false;
  bool may_take_long_ = false, has_place_ = false;
  bool begun_ = false, ended_ = false, keep_alive_ = false, chunked_ = false, events_ = false;
  bool head_ = false;  // the request is HEAD, whose answer has no body
  bool old_ = false;   // HTTP/1.0
  std::atomic<bool> gone_{false};
  bool half_closed_ = false;
  std::atomic<int64_t> unsent_{0};
  const std::shared_ptr<ByteBudget::Account> account_;
  std::shared_ptr<std::vector<ByteBudget::Charge>> charges_;  // of the body that is read
  int64_t charged_ = 0;
  std::vector<ByteBudget::Charge> reply_charges_;
};

}  // namespace carrel::http_api
