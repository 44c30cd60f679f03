// What carrel ask --api and chat --api read from servers that are not ours, or mean ill: text, or a message.
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/write.hpp>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using boost::asio::ip::tcp;
using testing::HasSubstr;
using testing::Not;

constexpr char kModels[] = R"({"data": [{"id": "m", "carrel": {"chat": true}}]})";

// Says one thing of its models, and one thing to every question.
class ForeignServer {
 public:
  ForeignServer(std::string models, std::string events)
      : models_(std::move(models)),
        events_(std::move(events)),
        acceptor_(io_, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0)),
        thread_([this] { Work(); }) {}
  ~ForeignServer() {
    stopping_ = true;
    boost::system::error_code error;
    tcp::socket(io_).connect(acceptor_.local_endpoint(), error);
    thread_.join();
  }
  std::string url() const {
    return absl::StrCat("http://127.0.0.1:", acceptor_.local_endpoint().port());
  }

 private:
  void Work() {
    for (;;) {
      boost::system::error_code error;
      tcp::socket socket = acceptor_.accept(error);
      if (stopping_) return;
      if (!error) Answer(socket);
    }
  }

  void Answer(tcp::socket& socket) {
    boost::system::error_code error;
    std::string request;
    const size_t head =
        boost::asio::read_until(socket, boost::asio::dynamic_buffer(request), "\r\n\r\n", error);
    const std::string length = "Content-Length: ";
    size_t body = 0;
    if (const size_t at = request.find(length); at != std::string::npos) {
      (void)absl::SimpleAtoi(
          request.substr(at + length.size(), request.find('\r', at) - at - length.size()), &body);
    }
    const size_t left = head + body - std::min(head + body, request.size());
    boost::asio::read(socket, boost::asio::dynamic_buffer(request),
                      boost::asio::transfer_exactly(left), error);
    const std::string& said = absl::StartsWith(request, "GET /v1/models") ? models_ : events_;
    boost::asio::write(
        socket,
        boost::asio::buffer(absl::StrCat("HTTP/1.1 200 OK\r\nContent-Length: ", said.size(),
                                         "\r\nConnection: close\r\n\r\n", said)),
        error);
  }

  const std::string models_, events_;
  std::atomic<bool> stopping_{false};
  boost::asio::io_context io_;
  tcp::acceptor acceptor_;
  std::thread thread_;
};

std::string Events(const std::vector<std::string>& events) {
  std::string stream;
  for (const std::string& event : events) absl::StrAppend(&stream, "data: ", event, "\n\n");
  return absl::StrCat(stream, "data: [DONE]\n\n");
}

Outcome AskOf(const ForeignServer& server) {
  return Carrel({"ask", "--api", server.url(), "Who?"});
}

// As other servers, and proxies in between, send it: the first chunk of a chat has a role and no content.
TEST(ApiPartnerTest, ChunksOfOtherServers_AreRead) {
  const std::string end =
      R"({"choices": [{"delta": {"content": "well"}, "finish_reason": "stop"}]})";
  for (
      const char* first :
      {R"({"choices": [{"index": 0, "delta": {"role": "assistant", "content": null}}]})",
       R"({"choices": [{"delta": null, "finish_reason": null}], "usage": null})",
       R"({"choices": [null, 5, [], {"delta": {"content": ["x"]}}, {"text": 7}]})",
       R"({"choices": null, "usage": {"prompt_tokens": "many", "completion_tokens": -1e300}})",
       R"({"choices": {"0": {}}, "usage": [1], "carrel": {"sources": [null, {"bytes": 5}], "prompt_ms": "x"}})",
       R"({"carrel": {"sampling": {"advised": ["top_k"], "temperature": null}}})", R"({})"}) {
    const ForeignServer server(kModels, Events({first, end}));
    const Outcome asked = AskOf(server);
    EXPECT_THAT(asked, Succeeds()) << first;
    EXPECT_EQ(asked.out, "well\n") << first;
    Command chat;
    chat.args = {"chat", "--api", server.url()};
    chat.input = "Who?\n";
    const Outcome said = Carrel(chat);
    EXPECT_THAT(said, Succeeds()) << first;
    EXPECT_THAT(said.out, HasSubstr("well")) << first;
  }
}

TEST(ApiPartnerTest, WhatIsNoAnswer_IsAMessage) {
  const std::string deep(200000, '[');
  for (const std::string& event :
       {std::string("5"), std::string("[]"), std::string("{"), std::string("\xff"), deep,
        absl::StrCat(R"({"choices": )", deep, "}")}) {
    const ForeignServer server(kModels, Events({event}));
    EXPECT_THAT(AskOf(server), FailsWith(2, Texts{"the server's answer"})) << event.substr(0, 40);
  }
  for (const std::string& models :
       {std::string("[]"), std::string("{}"), std::string(R"({"data": null})"),
        std::string(R"({"data": [{"id": 5, "carrel": 7}]})"), deep}) {
    const ForeignServer server(models, Events({}));
    const Outcome asked = AskOf(server);
    EXPECT_EQ(asked.signal, 0) << models.substr(0, 40);
    EXPECT_GT(asked.exit_code, 0) << models.substr(0, 40);
  }
}

// What a server says of an error is shown, but does not steer the terminal.
TEST(ApiPartnerTest, WordsOfAnError_AreHarmlessAndBounded) {
  const ForeignServer server(
      kModels, Events({absl::StrCat(R"({"error": {"message": "\u001b]0;x\u0007\u009b2J bad )",
                                    std::string(100000, 'x'), R"("}})")}));
  const Outcome asked = AskOf(server);
  EXPECT_THAT(asked, FailsWith(1, Texts{"bad x"}));
  EXPECT_THAT(asked.err, Not(HasSubstr("\x1b")));
  EXPECT_THAT(asked.err, Not(HasSubstr("\xc2\x9b")));
  EXPECT_LT(asked.err.size(), 5000u);
}

}  // namespace
}  // namespace carrel::cli
