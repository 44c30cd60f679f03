#include "common/certificate_test_util.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include "common/file.h"
#include "common/secret.h"
#include "common/status.h"

namespace carrel {
namespace {

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(X509_EXTENSION* extension) const { X509_EXTENSION_free(extension); }
};
using Certificate = std::unique_ptr<X509, Free>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Free>;

PrivateKey NewKey() { return PrivateKey(EVP_EC_gen("P-256")); }

template <typename Write>
std::string Pem(Write write) {
  const std::unique_ptr<BIO, Free> bio(BIO_new(BIO_s_mem()));
  CARREL_CHECK(write(bio.get()) == 1);
  char* data = nullptr;
  const long bytes = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(bytes));
}

std::string PemOf(X509* certificate) {
  return Pem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); });
}

void AddExtension(X509* certificate, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, certificate, certificate, nullptr, nullptr, 0);
  const std::unique_ptr<X509_EXTENSION, Free> extension(
      X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
  CARREL_CHECK(extension != nullptr);
  CARREL_CHECK(X509_add_ext(certificate, extension.get(), -1) == 1);
}

// Unsigned.
Certificate NewCertificate(const std::string& name, EVP_PKEY* key, absl::Time begin,
                           absl::Time end) {
  Certificate certificate(X509_new());
  X509_set_version(certificate.get(), 2);
  const std::string serial = RandomBytes(8);
  int64_t number = 0;
  for (const char c : serial.substr(0, 7)) number = number * 256 + static_cast<uint8_t>(c);
  ASN1_INTEGER_set_int64(X509_get_serialNumber(certificate.get()), number);
  ASN1_TIME_set(X509_getm_notBefore(certificate.get()), absl::ToTimeT(begin));
  ASN1_TIME_set(X509_getm_notAfter(certificate.get()), absl::ToTimeT(end));
  X509_set_pubkey(certificate.get(), key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate.get()), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.data()),
                             static_cast<int>(name.size()), -1, 0);
  return certificate;
}

}  // namespace

struct TestAuthority::Key {
  PrivateKey key;
  Certificate certificate;
};

TestAuthority::TestAuthority() : key_(std::make_unique<Key>()) {
  key_->key = NewKey();
  // Each has a name of its own: who trusts one must not take another's certificates for its.
  key_->certificate =
      NewCertificate("authority of a test " + std::to_string(absl::GetCurrentTimeNanos()),
                     key_->key.get(), absl::Now() - absl::Hours(2), absl::Now() + absl::Hours(2));
  X509* const own = key_->certificate.get();
  X509_set_issuer_name(own, X509_get_subject_name(own));
  AddExtension(own, NID_basic_constraints, "critical,CA:TRUE");
  AddExtension(own, NID_key_usage, "critical,keyCertSign,cRLSign");
  CARREL_CHECK(X509_sign(own, key_->key.get(), EVP_sha256()) > 0);
  certificate_ = PemOf(own);
}

TestAuthority::~TestAuthority() = default;

TestAuthority::Pair TestAuthority::Issue(const Wish& wish) const {
  const PrivateKey key = NewKey();
  const Certificate certificate = NewCertificate(wish.common_name, key.get(), wish.begin, wish.end);
  X509_set_issuer_name(certificate.get(), X509_get_subject_name(key_->certificate.get()));
  AddExtension(certificate.get(), NID_basic_constraints, "critical,CA:FALSE");
  if (!wish.dns.empty()) {
    AddExtension(certificate.get(), NID_subject_alt_name, "DNS:" + wish.dns + ",IP:127.0.0.1");
  }
  CARREL_CHECK(X509_sign(certificate.get(), key_->key.get(), EVP_sha256()) > 0);
  Pair pair;
  pair.certificate = PemOf(certificate.get());
  pair.key = Pem([&](BIO* bio) {
    return PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
  return pair;
}

void TestAuthority::Write(const std::string& folder, const Pair& pair, const std::string& ca) {
  const mode_t before = umask(077);
  CARREL_CHECK(WriteFileAtomically(folder + "/key.pem", pair.key).ok());
  CARREL_CHECK(WriteFileAtomically(folder + "/certificate.pem", pair.certificate).ok());
  CARREL_CHECK(WriteFileAtomically(folder + "/ca.pem", ca).ok());
  umask(before);
}

}  // namespace carrel
