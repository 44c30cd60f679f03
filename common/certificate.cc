#include "common/certificate.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <ctime>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/status.h"

namespace carrel {
namespace {

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
using Certificate = std::unique_ptr<X509, Free>;

std::unique_ptr<BIO, Free> Reader(const std::string& pem) {
  return std::unique_ptr<BIO, Free>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Asked for a passphrase there is none: a server starts without anybody at a terminal.
int NoPassphrase(char*, int, int, void*) { return 0; }

absl::StatusOr<std::vector<Certificate>> ParseCertificates(const std::string& pem,
                                                           const std::string& path) {
  const auto reader = Reader(pem);
  std::vector<Certificate> certificates;
  while (X509* one = PEM_read_bio_X509(reader.get(), nullptr, NoPassphrase, nullptr)) {
    certificates.emplace_back(one);
  }
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  const bool at_end = ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
  if (certificates.empty() || !at_end) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, certificates.empty() ? ": holds no certificate in PEM"
                                                : ": a certificate in it cannot be read"));
  }
  return certificates;
}

absl::Time FromAsn1(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

absl::Status CheckValid(X509* certificate, absl::Time now, const std::string& path,
                        absl::Time& expires) {
  const absl::Time begin = FromAsn1(X509_get0_notBefore(certificate));
  expires = FromAsn1(X509_get0_notAfter(certificate));
  if (now >= begin && now < expires) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": the certificate is valid from ",
                   absl::FormatTime(absl::RFC3339_sec, begin, absl::UTCTimeZone()), " to ",
                   absl::FormatTime(absl::RFC3339_sec, expires, absl::UTCTimeZone())));
}

absl::Status CheckKey(const std::string& pem, const std::string& path, X509* certificate,
                      const std::string& certificate_path) {
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && (info.st_mode & (S_IROTH | S_IWOTH)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": everybody may read this private key (chmod o= it)"));
  }
  const auto reader = Reader(pem);
  const std::unique_ptr<EVP_PKEY, Free> key(
      PEM_read_bio_PrivateKey(reader.get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": holds no private key in PEM without a passphrase"));
  }
  const bool fits = X509_check_private_key(certificate, key.get()) == 1;
  ERR_clear_error();
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": the key is not that of the certificate ", certificate_path));
}

}  // namespace

absl::StatusOr<TlsPem> ReadTlsFiles(const TlsFiles& files, absl::Time now) {
  TlsPem pem;
  if (files.certificate.empty() != files.key.empty()) {
    return absl::InvalidArgumentError(
        files.key.empty() ? absl::StrCat("the certificate ", files.certificate, " needs its key")
                          : absl::StrCat("the key ", files.key, " needs its certificate"));
  }
  if (!files.certificate.empty()) {
    ASSIGN_OR_RETURN(pem.certificate, ReadFile(files.certificate));
    ASSIGN_OR_RETURN(pem.key, ReadFile(files.key));
    ASSIGN_OR_RETURN(const std::vector<Certificate> chain,
                     ParseCertificates(pem.certificate, files.certificate));
    RETURN_IF_ERROR(CheckValid(chain[0].get(), now, files.certificate, pem.expires));
    RETURN_IF_ERROR(CheckKey(pem.key, files.key, chain[0].get(), files.certificate));
  }
  if (!files.ca.empty()) {
    ASSIGN_OR_RETURN(pem.ca, ReadFile(files.ca));
    RETURN_IF_ERROR(ParseCertificates(pem.ca, files.ca).status());
  }
  return pem;
}

}  // namespace carrel
