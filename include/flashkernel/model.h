// Model files and tokenizers, as FlashKernel's C ABI. Text is UTF-8 with its length in bytes.
#ifndef FLASHKERNEL_MODEL_H_
#define FLASHKERNEL_MODEL_H_

#include "flashkernel/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fk_model fk_model;
typedef struct fk_tokenizer fk_tokenizer;

// A Hugging Face folder, a .safetensors, .gguf or llama2.c .bin file, mapped until fk_model_close.
// `tokenizer` names a tokenizer file; NULL: the one in or beside the model.
FK_API fk_status fk_model_open(const char* path, const char* tokenizer, fk_model** model);
FK_API void fk_model_close(fk_model* model);
// JSON: the configuration, the format, how many bytes of weights. Valid until fk_model_close.
FK_API const char* fk_model_info(const fk_model* model);
// The model's own, valid until fk_model_close; NULL where it has none (fk_model_info says why).
FK_API const fk_tokenizer* fk_model_tokenizer(const fk_model* model);

// Weights by index, and one of them as floats: `out` holds rows * columns.
FK_API size_t fk_model_weight_count(const fk_model* model);
FK_API fk_status fk_model_weight(const fk_model* model, size_t index, const char** name,
                                 const char** type, int64_t* rows, int64_t* columns);
FK_API fk_status fk_model_read_weight(const fk_model* model, size_t index, float* out);

// A tokenizer alone: tokenizer.json or its folder, a .gguf, llama2.c's tokenizer.bin, a
// .safetensors or llama2.c .bin file that has one beside it; an empty path: the built-in model's.
FK_API fk_status fk_tokenizer_open(const char* path, fk_tokenizer** tokenizer);
FK_API void fk_tokenizer_close(fk_tokenizer* tokenizer);  // only for those of fk_tokenizer_open
// JSON: size, bos, eos, chat format. Valid as long as the tokenizer.
FK_API const char* fk_tokenizer_info(const fk_tokenizer* tokenizer);

// Writes at most `capacity` ids; *count is how many there are (a text of n bytes has at most about
// n). add_special: what the model puts around every text. parse_special: "<|im_end|>" is a token.
FK_API fk_status fk_tokenizer_encode(const fk_tokenizer* tokenizer, const char* text, size_t bytes,
                                     int32_t add_special, int32_t parse_special, int32_t* ids,
                                     size_t capacity, size_t* count);
// Writes at most `capacity` bytes; *bytes is how many there are. An id that the tokenizer does not
// have is an error.
FK_API fk_status fk_tokenizer_decode(const fk_tokenizer* tokenizer, const int32_t* ids,
                                     size_t count, int32_t skip_special, char* text,
                                     size_t capacity, size_t* bytes);
// A conversation in the model's own format: `count` roles and contents (null-terminated), and
// where `prompt` is not 0, the beginning of the assistant's next turn. Writes as the two above do;
// `ids` and `text` may each be NULL.
FK_API fk_status fk_tokenizer_chat(const fk_tokenizer* tokenizer, const char* const* roles,
                                   const char* const* contents, size_t count, int32_t prompt,
                                   int32_t* ids, size_t id_capacity, size_t* id_count, char* text,
                                   size_t text_capacity, size_t* text_bytes);
// The id of a token by its spelling in the file, -1 where there is none.
FK_API int32_t fk_tokenizer_find(const fk_tokenizer* tokenizer, const char* token);

// `count` weights of a GGUF type ("Q4_K") out of `bytes` bytes, as floats.
FK_API fk_status fk_dequantize(const char* type, const void* data, size_t bytes, int64_t count,
                               float* out);

#ifdef __cplusplus
}
#endif

#endif  // FLASHKERNEL_MODEL_H_
