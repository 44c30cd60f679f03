carrel_library(carrel_store_client
  SOURCES client/resuming_client.cc client/store_client_grpc.cc client/wire.cc
  DEPS carrel_common carrel_grpc carrel_retrieval)

# A store of its own process, to be killed.
add_executable(stalling_store client/stalling_store.cc)
target_link_libraries(stalling_store PRIVATE carrel_flags carrel_grpc)

carrel_test(store_client_test
  SOURCES client/resuming_client_test.cc client/store_client_test.cc client/wire_test.cc
  DEPS carrel_store_client carrel_test_util)
add_dependencies(store_client_test stalling_store)
