# The tokenizers, apart from the rest of model/: they need neither weights nor a backend.
carrel_library(carrel_tokenizer
  SOURCES added_tokens.cc bpe_model.cc bpe_tokenizer.cc byte_alphabet.cc gguf_tokenizer.cc tokenizer_fields.cc oniguruma.cc
          pretokenizer.cc sentencepiece_library.cc sentencepiece_spec.cc sentencepiece_tokenizer.cc split_pattern.cc
          tokenizer.cc tokenizer_config.cc tokenizer_json.cc unicode.cc utf8.cc
  DEPS carrel_common carrel_gguf absl::flat_hash_map absl::flat_hash_set
       nlohmann_json::nlohmann_json PkgConfig::pcre2 PkgConfig::utf8proc ${CMAKE_DL_LIBS})

add_library(carrel_sentencepiece MODULE sentencepiece_module.cc)
target_link_libraries(carrel_sentencepiece PRIVATE carrel_flags PkgConfig::sentencepiece)
set_target_properties(carrel_sentencepiece PROPERTIES CXX_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
add_dependencies(carrel_tokenizer carrel_sentencepiece)

carrel_test(tokenizer_test
  SOURCES added_tokens_test.cc bpe_model_test.cc gguf_tokenizer_test.cc gguf_writer.cc pretokenizer_test.cc sentencepiece_reference.cc
          sentencepiece_tokenizer_test.cc stream_decoder_test.cc tokenizer_golden_test.cc
          tokenizer_json_test.cc tokenizer_test_util.cc unicode_test.cc utf8_test.cc
  DEPS carrel_tokenizer carrel_test_util nlohmann_json::nlohmann_json PkgConfig::sentencepiece)
