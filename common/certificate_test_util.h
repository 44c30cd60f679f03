// What: a certificate authority that lives as long as a test. Tests only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace carrel {

class TestAuthority {
 public:
  TestAuthority();
  ~TestAuthority();

  struct Pair {
    std::string certificate, key;  // PEM
  };
  struct Wish {
    std::string common_name;
    std::string dns;  // empty: none, and 127.0.0.1 neither
    absl::Time begin = absl::Now() - absl::Hours(1);
    absl::Time end = absl::Now() + absl::Hours(1);
  };
  const std::string& certificate() const { return certificate_; }  // PEM
  Pair Issue(const Wish& wish) const;

  // certificate.pem, key.pem (0600) and ca.pem in the folder, each replaced at once.
  static void Write(const std::string& folder, const Pair& pair, const std::string& ca);

 private:
  struct Key;
  const std::unique_ptr<Key> key_;
  std::string certificate_;
};

}  // namespace carrel
