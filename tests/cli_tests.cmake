# Tests that run the program as its users do: a child process, its output and its exit code.
add_library(carrel_test_cli STATIC cli.cc cli_world.cc)
target_compile_definitions(carrel_test_cli PRIVATE
  CARREL_SOURCE_DIR="${CMAKE_SOURCE_DIR}" CARREL_BINARY_DIR="${CMAKE_BINARY_DIR}")
target_link_libraries(carrel_test_cli PUBLIC
  carrel_flags carrel_common carrel_test_gguf carrel_test_util nlohmann_json::nlohmann_json GTest::gmock)
add_dependencies(carrel_test_cli carrel)

carrel_test(cli_test
  SOURCES access_test.cc adapter_test.cc api_audit_test.cc api_disk_test.cc api_partner_test.cc api_test.cc bad_input_test.cc bad_model_test.cc bad_store_test.cc beyond_trained_test.cc cli_output_test.cc plan_test.cc
          family_test.cc gguf_model_test.cc remote_document_test.cc transfer_test.cc
  DEPS carrel_gguf carrel_audit_test_util carrel_kvstore_test_util carrel_test_cli LABELS e2e TIMEOUT 600)
if(NOT CARREL_SANITIZE AND NOT CMAKE_BUILD_TYPE STREQUAL Debug)
  carrel_test(hardening_test SOURCES hardening_test.cc DEPS carrel_test_util absl::strings)
  target_compile_definitions(hardening_test PRIVATE CARREL_HARDEN=$<BOOL:${CARREL_HARDEN}>)
  add_dependencies(hardening_test carrel)
endif()
carrel_test(deploy_test
  SOURCES deploy_test.cc DEPS carrel_test_cli LABELS e2e TIMEOUT 300)
# The full flood: CARREL_FLOOD=full build/release/flood_test.
carrel_test(flood_test
  SOURCES flood_test.cc ../kvstore/service/service_test_util.cc
  DEPS carrel_test_cli carrel_kvstore_service carrel_kvstore_test_context LABELS slow TIMEOUT 900)
carrel_test(fault_test
  SOURCES fault_test.cc serve_fault_test.cc transfer_fault_test.cc
  DEPS carrel_test_cli carrel_kvstore_storage carrel_proto LABELS slow TIMEOUT 900)
carrel_test(bucket_cli_test
  SOURCES bucket_fault_test.cc bucket_test.cc replica_api_test.cc routing_test.cc
  DEPS carrel_test_cli carrel_kvstore_remote carrel_kvstore_remote_test_util LABELS slow TIMEOUT 900)
carrel_test(jobs_cli_test
  SOURCES jobs_api_test.cc jobs_test.cc
  DEPS carrel_test_cli carrel_kvstore_remote carrel_kvstore_remote_test_util carrel_serving_test_util LABELS slow TIMEOUT 900)
# People who use the program, step by step; docs/using.md and README.md as typed.
foreach(walk IN ITEMS home team using)
  add_test(NAME walk_${walk} COMMAND python3 -B ${CMAKE_CURRENT_SOURCE_DIR}/walks/${walk}.py $<TARGET_FILE:carrel>)
  set_tests_properties(walk_${walk} PROPERTIES LABELS e2e TIMEOUT 900)
endforeach()
# Answers have the bits that they have alone, and that they had (tests/bits/known.jsonl).
add_test(NAME bits COMMAND python3 -B ${CMAKE_CURRENT_SOURCE_DIR}/bits/bits.py $<TARGET_FILE:carrel>)
set_tests_properties(bits PROPERTIES LABELS e2e TIMEOUT 600)
# The page of carrel api in a browser: ./run test page, which installs one. Not in ./run test: it waits on what is seen.
add_test(NAME page COMMAND python3 -B ${CMAKE_CURRENT_SOURCE_DIR}/page/page_test.py $<TARGET_FILE:carrel>)
set_tests_properties(page PROPERTIES LABELS browser TIMEOUT 600 SKIP_RETURN_CODE 77)
# docs/cli.md is what the program says of itself, and another page is not.
foreach(page IN ITEMS docs/cli.md docs/using.md)
  add_test(NAME "cli_page: ${page}" COMMAND ${CMAKE_SOURCE_DIR}/tools/cli-page --check $<TARGET_FILE:carrel> ${CMAKE_SOURCE_DIR}/${page})
  set_tests_properties("cli_page: ${page}" PROPERTIES LABELS e2e TIMEOUT 60)
endforeach()
set_tests_properties("cli_page: docs/using.md" PROPERTIES PASS_REGULAR_EXPRESSION "is not what the program says")
# docs/decisions/README.md is what the decisions say of themselves, and another page is not.
foreach(page IN ITEMS docs/decisions/README.md docs/using.md)
  add_test(NAME "decisions_index: ${page}" COMMAND ${CMAKE_SOURCE_DIR}/tools/decisions-index --check ${CMAKE_SOURCE_DIR}/${page})
  set_tests_properties("decisions_index: ${page}" PROPERTIES LABELS e2e TIMEOUT 60)
endforeach()
set_tests_properties("decisions_index: docs/using.md" PROPERTIES PASS_REGULAR_EXPRESSION "is not what the decisions say")
# A cluster of deploy/cluster's own files, with the parts that ./run deps cluster fetches; alone, for it is broken on purpose
# and waits for what comes back: ./run test cluster.
add_test(NAME cluster_files COMMAND python3 -B ${CMAKE_CURRENT_SOURCE_DIR}/cluster/files_test.py ${CMAKE_BINARY_DIR})
set_tests_properties(cluster_files PROPERTIES LABELS e2e TIMEOUT 120)
if(NOT CARREL_SANITIZE)
  foreach(part IN ITEMS cluster runbook)
    add_test(NAME ${part} COMMAND python3 -B ${CMAKE_CURRENT_SOURCE_DIR}/cluster/${part}_test.py $<TARGET_FILE:carrel>)
    set_tests_properties(${part} PROPERTIES LABELS "cluster;slow" TIMEOUT 600 SKIP_RETURN_CODE 77 RUN_SERIAL ON)
  endforeach()
endif()
# Manual pages and completion tell every flag; they are installed with the program.
add_test(NAME manual COMMAND python3 -B ${CMAKE_CURRENT_SOURCE_DIR}/manual_test.py $<TARGET_FILE:carrel>)
set_tests_properties(manual PROPERTIES LABELS e2e TIMEOUT 60)
