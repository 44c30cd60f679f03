carrel_library(carrel_store_client
  SOURCES store_client.cc
  DEPS carrel_common carrel_grpc)
