// What: a blocking HTTP client for tests.
#pragma once

#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace carrel::http_api {

class TestClient {
 public:
  explicit TestClient(const std::string& address) : socket_(io_) {
    const size_t colon = address.rfind(':');
    int port = 0;
    (void)absl::SimpleAtoi(address.substr(colon + 1), &port);
    socket_.connect(
        {boost::asio::ip::make_address(address.substr(0, colon)), static_cast<uint16_t>(port)});
  }

  void Send(const std::string& bytes) { boost::asio::write(socket_, boost::asio::buffer(bytes)); }

  void Post(const std::string& target, const std::string& body, const std::string& headers = "") {
    // A server that refuses by the headers may not take all of the body.
    (void)TrySend(absl::StrCat("POST ", target, " HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: ",
                               body.size(), "\r\n", headers, "\r\n", body));
  }

  void Ask(const std::string& method, const std::string& target, const std::string& headers = "") {
    Send(absl::StrCat(method, " ", target, " HTTP/1.1\r\nHost: 127.0.0.1\r\n", headers, "\r\n"));
  }

  // Until `wanted` bytes or the end of the stream.
  std::string Read(size_t wanted) {
    std::string bytes(wanted, '\0');
    boost::system::error_code error;
    bytes.resize(boost::asio::read(socket_, boost::asio::buffer(bytes), error));
    return bytes;
  }

  std::string ReadUntil(const std::string& end) {
    std::string bytes;
    while (bytes.size() < end.size() ||
           bytes.compare(bytes.size() - end.size(), end.size(), end) != 0) {
      const std::string next = Read(1);
      if (next.empty()) break;
      bytes += next;
    }
    return bytes;
  }

  struct Response {
    int status = 0;
    std::string headers, body;
  };
  // Whole, by its length or in chunks.
  Response Receive() {
    Response response;
    response.headers = ReadUntil("\r\n\r\n");
    if (response.headers.size() < 12) return response;
    (void)absl::SimpleAtoi(response.headers.substr(9, 3), &response.status);
    const std::string name = "Content-Length: ";
    if (const size_t at = response.headers.find(name); at != std::string::npos) {
      response.body = Read(std::stoul(response.headers.substr(at + name.size())));
      return response;
    }
    for (;;) {
      const std::string size = ReadUntil("\r\n");
      const size_t bytes = size.empty() ? 0 : std::stoul(size, nullptr, 16);
      response.body += Read(bytes);
      if (Read(2).empty() || bytes == 0) return response;
    }
  }

  void Close() { socket_.close(); }
  void CloseSending() { socket_.shutdown(boost::asio::ip::tcp::socket::shutdown_send); }
  // False: the other side takes no more.
  bool TrySend(const std::string& bytes) {
    boost::system::error_code error;
    boost::asio::write(socket_, boost::asio::buffer(bytes), error);
    return !error;
  }

 private:
  boost::asio::io_context io_;
  boost::asio::ip::tcp::socket socket_;
};

class UnixClient {
 public:
  explicit UnixClient(const std::string& path) : socket_(io_) { socket_.connect(path); }
  void Send(const std::string& bytes) { boost::asio::write(socket_, boost::asio::buffer(bytes)); }
  std::string ReadAll() {
    std::string all;
    boost::system::error_code error;
    boost::asio::read(socket_, boost::asio::dynamic_buffer(all), error);
    return all;
  }

 private:
  boost::asio::io_context io_;
  boost::asio::local::stream_protocol::socket socket_;
};

}  // namespace carrel::http_api
