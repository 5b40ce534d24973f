// Reads Hugging Face's tokenizer.json, of which it knows the parts that the supported models use. A
// part that it does not know is an error: leaving it out would give other ids.
#include <algorithm>

#include "model/chat.h"
#include "model/check_config.h"
#include "model/formats.h"
#include "model/mapped_file.h"
#include "model/text_tokenizer.h"
#include "model/unicode.h"

namespace fk::model {
namespace {

constexpr int kMaxSequence = 4;  // how deep sequences may lie inside sequences
// These are the most normalizers or pre-tokenizers, and the most ids around a text. Known
// tokenizers have up to 6 and 3.
constexpr size_t kMaxParts = 32;
constexpr size_t kMaxTemplateIds = 1024;

// Returns the "type" of a part, or "".
std::string type_of(const Json& json) {
  if (!json.is_object()) return "";
  const auto type = json.find("type");
  return type != json.end() && type->is_string() ? type->get<std::string>() : "";
}

// Returns the error for a part whose type is not supported.
Status unknown_part(const std::string& file, const char* part, const Json& json) {
  return unsupported(file + ": " + part + ": " + shown_text(type_of(json)) + " is not supported");
}

// Calls step(json) for a part, or for each part of a sequence, whose field `list` holds them.
// `part` is the name in errors.
template <class Step>
Status each_part(const std::string& file, const char* part, const char* list, const Json& json,
                 const Step& step, int depth = 0) {
  if (json.is_null()) return {};
  if (type_of(json) != "Sequence") return step(json);
  const auto parts = json.find(list);
  if (parts == json.end() || !parts->is_array() || depth >= kMaxSequence) {
    return file_error(file, std::string(part) + "." + list + ": expected an array of parts");
  }
  for (const Json& inner : *parts) {
    FK_RETURN_IF_ERROR(each_part(file, part, list, inner, step, depth + 1));
  }
  return {};
}

// Reads the field "pattern", which is {"String": text} or {"Regex": expression}.
Status read_pattern(const JsonFields& fields, size_t* machine_code_left,
                    std::shared_ptr<const Pattern>* pattern) {
  const Json* json = fields.find("pattern");
  if (json == nullptr || !json->is_object() || json->size() != 1 ||
      !json->begin().value().is_string() ||
      (json->begin().key() != "String" && json->begin().key() != "Regex")) {
    return fields.error("pattern", "expected {\"String\": ...} or {\"Regex\": ...}");
  }
  const Status status =
      Pattern::compile(json->begin().value().get_ref<const std::string&>(),
                       json->begin().key() == "String", machine_code_left, pattern);
  return status.ok() ? status : fields.error("pattern", status.message());
}

Status check_count(const std::string& file, const char* part, size_t count) {
  if (count < kMaxParts) return {};
  return file_error(file, std::string(part) + ": expected at most " + std::to_string(kMaxParts) +
                              " parts, got more");
}

Status read_normalizer(const std::string& file, const Json& json, TextTokenizer* tokenizer) {
  FK_RETURN_IF_ERROR(check_count(file, "normalizer", tokenizer->normalizers.size()));
  const JsonFields fields(file, json, "normalizer.");
  const std::string type = type_of(json);
  NormalizeStep step{NormalizeStep::kNfc, "", nullptr};
  if (type == "Prepend") {
    step.kind = NormalizeStep::kPrepend;
    FK_RETURN_IF_ERROR(fields.get("prepend", &step.text));
  } else if (type == "Replace") {
    step.kind = NormalizeStep::kReplace;
    FK_RETURN_IF_ERROR(fields.get("content", &step.text));
    FK_RETURN_IF_ERROR(read_pattern(fields, &tokenizer->machine_code_left, &step.pattern));
  } else if (type != "NFC") {
    return unknown_part(file, "normalizer", json);
  }
  tokenizer->normalizers.push_back(std::move(step));
  return {};
}

// Reads when a space is put in front, for which there are two fields.
Status read_prepend(const JsonFields& fields, Prepend* prepend) {
  std::string scheme = "always";
  bool add = true;
  FK_RETURN_IF_ERROR(fields.get("prepend_scheme", &scheme));
  FK_RETURN_IF_ERROR(fields.get("add_prefix_space", &add));
  if (scheme != "always" && scheme != "first" && scheme != "never") {
    return fields.error("prepend_scheme",
                        "expected always, first or never, got " + shown_text(scheme));
  }
  *prepend = !add || scheme == "never" ? Prepend::kNever
             : scheme == "first"       ? Prepend::kFirst
                                       : Prepend::kAlways;
  return {};
}

// Reads the character that Metaspace writes for a space.
Status read_sign(const JsonFields& fields, std::string* sign) {
  FK_RETURN_IF_ERROR(fields.get("replacement", sign));
  if (!sign->empty() && utf8_length(*sign) == sign->size()) return {};
  return fields.error("replacement", "expected one character, got " + shown_text(*sign));
}

// Reads a Split.
Status read_split(const JsonFields& fields, size_t* machine_code_left, SplitStep* step) {
  FK_RETURN_IF_ERROR(read_pattern(fields, machine_code_left, &step->pattern));
  FK_RETURN_IF_ERROR(fields.get("invert", &step->invert));
  std::string behavior;
  FK_RETURN_IF_ERROR(fields.get("behavior", &behavior));
  static constexpr const char* kBehaviors[] = {"Isolated", "Removed", "MergedWithPrevious",
                                               "MergedWithNext", "Contiguous"};
  const auto found = std::find(std::begin(kBehaviors), std::end(kBehaviors), behavior);
  if (found == std::end(kBehaviors)) {
    return fields.error("behavior", "expected a known one, got " + shown_text(behavior));
  }
  step->behavior = static_cast<SplitStep::Behavior>(found - std::begin(kBehaviors));
  return {};
}

Status read_pre_tokenizer(const std::string& file, const Json& json, TextTokenizer* tokenizer) {
  FK_RETURN_IF_ERROR(check_count(file, "pre_tokenizer", tokenizer->splits.size()));
  const JsonFields fields(file, json, "pre_tokenizer.");
  const std::string type = type_of(json);
  if (tokenizer->byte_level) {
    return unsupported(file + ": pre_tokenizer: expected ByteLevel to be the last part, got " +
                       shown_text(type) + " after it");
  }
  size_t* machine_code = &tokenizer->machine_code_left;
  SplitStep step;
  if (type == "Split") {
    FK_RETURN_IF_ERROR(read_split(fields, machine_code, &step));
  } else if (type == "Digits") {
    bool individual = false;
    FK_RETURN_IF_ERROR(fields.get("individual_digits", &individual));
    if (!individual) step.behavior = SplitStep::kContiguous;
    FK_RETURN_IF_ERROR(Pattern::compile(kNumberPattern, false, machine_code, &step.pattern));
  } else if (type == "Metaspace") {
    step.kind = SplitStep::kMetaspace;
    step.sign = kMetaspace;
    step.behavior = SplitStep::kWithNext;
    FK_RETURN_IF_ERROR(read_sign(fields, &step.sign));
    bool split = true;  // whether each sign begins a word
    FK_RETURN_IF_ERROR(fields.get("split", &split));
    if (split) FK_RETURN_IF_ERROR(Pattern::compile(step.sign, true, machine_code, &step.pattern));
    FK_RETURN_IF_ERROR(read_prepend(fields, &step.prepend));
  } else if (type == "ByteLevel") {
    step.kind = SplitStep::kByteLevel;
    bool prefix = true, split = true;
    FK_RETURN_IF_ERROR(fields.get("add_prefix_space", &prefix));
    FK_RETURN_IF_ERROR(fields.get("use_regex", &split));
    if (prefix) step.prepend = Prepend::kAlways;
    if (split)
      FK_RETURN_IF_ERROR(Pattern::compile(kGpt2Pattern, false, machine_code, &step.pattern));
    tokenizer->byte_level = true;
  } else {
    return unknown_part(file, "pre_tokenizer", json);
  }
  tokenizer->splits.push_back(std::move(step));
  return {};
}

// Reads a decoder. Decoders may come in any number, but their effects always have the same order,
// so only what they are is kept.
Status read_decoder(const std::string& file, const Json& json, TextTokenizer* tokenizer) {
  const JsonFields fields(file, json, "decoder.");
  const std::string type = type_of(json);
  if (type == "ByteLevel") {
    if (!tokenizer->byte_level) {
      return unsupported(file + ": decoder: ByteLevel without a pre_tokenizer of that type");
    }
  } else if (type == "ByteFallback") {
    tokenizer->byte_tokens = true;
  } else if (type == "Metaspace") {
    tokenizer->space = kMetaspace;
    FK_RETURN_IF_ERROR(read_sign(fields, &tokenizer->space));
    Prepend prepend;
    FK_RETURN_IF_ERROR(read_prepend(fields, &prepend));
    tokenizer->strip_first_space = prepend != Prepend::kNever;
  } else if (type == "Replace") {
    const Json* pattern = fields.find("pattern");
    std::string content;
    FK_RETURN_IF_ERROR(fields.get("content", &content));
    const bool spells_space = pattern != nullptr && pattern->is_object() && pattern->size() == 1 &&
                              pattern->begin().key() == "String" && *pattern->begin() == kMetaspace;
    if (!spells_space || content != " ") {
      return unsupported(file + ": decoder: Replace: expected " + std::string(kMetaspace) +
                         " by a space");
    }
    tokenizer->space = kMetaspace;
  } else if (type == "Strip") {
    int64_t start = 0, stop = 0;
    std::string content;
    FK_RETURN_IF_ERROR(fields.get("start", &start, 0, INT32_MAX));
    FK_RETURN_IF_ERROR(fields.get("stop", &stop, 0, INT32_MAX));
    FK_RETURN_IF_ERROR(fields.get("content", &content));
    if (content != " " || start > 1 || stop > 0) {
      return unsupported(file + ": decoder: Strip: expected one space at the start");
    }
    tokenizer->strip_first_space = start == 1;
  } else if (type != "Fuse") {
    return unknown_part(file, "decoder", json);
  }
  return {};
}

// Reads the template of a single text: special tokens, the text, special tokens.
Status read_post_processor(const std::string& file, const Json& json, TextTokenizer* tokenizer) {
  const JsonFields fields(file, json, "post_processor.");
  const std::string type = type_of(json);
  if (type == "ByteLevel") return {};  // changes only offsets, which we do not return
  if (type != "TemplateProcessing") return unknown_part(file, "post_processor", json);
  const Json* single = fields.find("single");
  const Json* special = fields.find("special_tokens");
  if (single == nullptr || !single->is_array()) return fields.error("single", "expected an array");
  std::vector<int32_t>* side = &tokenizer->prefix;
  for (const Json& part : *single) {
    if (part.is_object() && part.contains("Sequence")) {
      side = &tokenizer->suffix;
      continue;
    }
    const Json* id = nullptr;
    if (part.is_object() && part.contains("SpecialToken") && part["SpecialToken"].is_object() &&
        part["SpecialToken"].contains("id")) {
      id = &part["SpecialToken"]["id"];
    }
    if (id == nullptr || !id->is_string() || special == nullptr || !special->is_object() ||
        !special->contains(id->get<std::string>())) {
      return fields.error("single", "expected sequences and known special tokens");
    }
    const Json& entry = (*special)[id->get<std::string>()];
    if (!entry.is_object() || !entry.contains("ids") || !entry["ids"].is_array()) {
      return fields.error("special_tokens", "expected ids for " + shown(*id));
    }
    for (const Json& number : entry["ids"]) {
      if (!number.is_number_unsigned() ||
          number.get<uint64_t>() >= static_cast<uint64_t>(tokenizer->size())) {
        return fields.error(
            "special_tokens",
            "expected ids below " + std::to_string(tokenizer->size()) + ", got " + shown(number));
      }
      side->push_back(number.get<int32_t>());
      if (tokenizer->prefix.size() + tokenizer->suffix.size() > kMaxTemplateIds) {
        return fields.error("single", "expected at most " + std::to_string(kMaxTemplateIds) +
                                          " ids around a text, got more");
      }
    }
  }
  return {};
}

// Returns a bound for ids. Some ids may be unused, but not so many that a small file asks for much
// memory.
uint64_t id_limit(size_t tokens) {
  return std::min<uint64_t>(kMaxVocab, 2 * uint64_t{tokens} + (1 << 16));
}

// Puts a token's spelling at its id, which is below `limit`.
Status place_token(const std::string& file, const std::string& where, const std::string& text,
                   const Json& id, uint64_t limit, TextTokenizer* tokenizer) {
  if (!id.is_number_unsigned() || id.get<uint64_t>() >= limit) {
    return file_error(file, where + ": expected an id below " + std::to_string(limit) + " for " +
                                shown_text(text) + ", got " + shown(id));
  }
  const size_t at = id.get<size_t>();
  if (at >= tokenizer->tokens.size()) tokenizer->tokens.resize(at + 1);
  std::string& place = tokenizer->tokens[at];
  if (!place.empty() && place != text) {
    return file_error(file, where + ": expected one token for each id, got " + shown_text(place) +
                                " and " + shown_text(text) + " for " + std::to_string(at));
  }
  place = text;
  return {};
}

// Reads the merges, whose order is their rank.
Status read_merges(const JsonFields& fields, const Json& vocab, TextTokenizer* tokenizer) {
  const Json* list = fields.find("merges");
  if (list == nullptr || !list->is_array()) return fields.error("merges", "expected an array");
  std::vector<Merge> merges;
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& entry = (*list)[i];
    const auto error = [&](const std::string& what) {
      return fields.error("merges",
                          "merge " + std::to_string(i) + ": " + what + ", got " + shown(entry));
    };
    std::string left, right;
    if (entry.is_string()) {
      const std::string& text = entry.get_ref<const std::string&>();
      const size_t gap = text.find(' ');
      if (gap == std::string::npos || text.find(' ', gap + 1) != std::string::npos) {
        return error("expected two tokens with a space between");
      }
      left = text.substr(0, gap);
      right = text.substr(gap + 1);
    } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() &&
               entry[1].is_string()) {
      left = entry[0].get<std::string>();
      right = entry[1].get<std::string>();
    } else {
      return error("expected two tokens");
    }
    // A merge with an empty token would repeat forever.
    if (left.empty() || right.empty()) return error("expected two tokens of a character or more");
    const auto a = vocab.find(left), b = vocab.find(right), result = vocab.find(left + right);
    if (a == vocab.end() || b == vocab.end() || result == vocab.end()) {
      return error("expected both parts and what they make among the tokens");
    }
    merges.push_back(
        {a->get<int32_t>(), b->get<int32_t>(), result->get<int32_t>(), static_cast<int32_t>(i)});
  }
  tokenizer->bpe.merges.build(merges);
  return {};
}

// Reads the vocabulary and the options of BPE.
Status read_model(const std::string& file, const Json& json, TextTokenizer* tokenizer) {
  const JsonFields fields(file, json, "model.");
  if (type_of(json) != "BPE" && json.is_object() && json.contains("type")) {
    return unknown_part(file, "model", json);
  }
  const Json* vocab = fields.find("vocab");
  if (vocab == nullptr || !vocab->is_object() || vocab->empty()) {
    return fields.error("vocab", "expected an object of tokens");
  }
  const uint64_t limit = id_limit(vocab->size());
  for (const auto& [text, id] : vocab->items()) {
    FK_RETURN_IF_ERROR(place_token(file, "model.vocab", text, id, limit, tokenizer));
  }
  std::string unknown, prefix, suffix;
  FK_RETURN_IF_ERROR(fields.get("unk_token", &unknown));
  FK_RETURN_IF_ERROR(fields.get("continuing_subword_prefix", &prefix));
  FK_RETURN_IF_ERROR(fields.get("end_of_word_suffix", &suffix));
  double dropout = 0;
  FK_RETURN_IF_ERROR(fields.get("dropout", &dropout));
  if (!prefix.empty() || !suffix.empty() || dropout != 0) {
    return unsupported(file +
                       ": model: continuing_subword_prefix, end_of_word_suffix and dropout are not "
                       "supported");
  }
  Bpe& bpe = tokenizer->bpe;
  FK_RETURN_IF_ERROR(fields.get("fuse_unk", &bpe.fuse_unknown));
  FK_RETURN_IF_ERROR(fields.get("byte_fallback", &bpe.byte_fallback));
  FK_RETURN_IF_ERROR(fields.get("ignore_merges", &bpe.ignore_merges));
  if (!unknown.empty()) {
    if (!vocab->contains(unknown)) {
      return fields.error("unk_token", shown_text(unknown) + " is not in the vocabulary");
    }
    bpe.unknown = (*vocab)[unknown].get<int32_t>();
  }
  if (tokenizer->byte_level) {
    set_byte_level_ids(tokenizer);
  } else {
    for (const auto& [text, id] : vocab->items()) bpe.ids.set(text, id.get<int32_t>());
    set_byte_token_ids(tokenizer);
  }
  return read_merges(fields, *vocab, tokenizer);
}

// Reads the added tokens.
Status read_added(const std::string& file, const Json& json, TextTokenizer* tokenizer) {
  if (json.is_null()) return {};
  if (!json.is_array()) return file_error(file, "added_tokens: expected an array");
  const uint64_t limit = id_limit(tokenizer->tokens.size() + json.size());
  for (const Json& entry : json) {
    const JsonFields fields(file, entry, "added_tokens.");
    AddedToken token;
    FK_RETURN_IF_ERROR(fields.get("content", &token.content));
    const Json* id = fields.find("id");
    if (id == nullptr || token.content.empty()) {
      return file_error(file, "added_tokens: expected an id and a content for each");
    }
    FK_RETURN_IF_ERROR(place_token(file, "added_tokens", token.content, *id, limit, tokenizer));
    token.id = id->get<int32_t>();
    FK_RETURN_IF_ERROR(fields.get("special", &token.special));
    FK_RETURN_IF_ERROR(fields.get("single_word", &token.single_word));
    FK_RETURN_IF_ERROR(fields.get("lstrip", &token.lstrip));
    FK_RETURN_IF_ERROR(fields.get("rstrip", &token.rstrip));
    FK_RETURN_IF_ERROR(fields.get("normalized", &token.normalized));
    tokenizer->added.push_back(std::move(token));
  }
  return {};
}

// Returns the id of a token that tokenizer_config.json names as "<s>" or as {"content": "<s>",
// ...}; -1 if it names none or no token.
int32_t find_named(const Json* config, const char* name, const TextTokenizer& tokenizer) {
  if (config == nullptr || !config->contains(name)) return -1;
  const Json* token = &(*config)[name];
  if (token->is_object() && token->contains("content")) token = &(*token)["content"];
  return token->is_string() ? tokenizer.find(token->get<std::string>()) : -1;
}

// Returns the chat template, which may be a text or a list of named ones, of which "default"
// counts.
std::string find_template(const Json* config) {
  if (config == nullptr || !config->contains("chat_template")) return "";
  const Json& json = (*config)["chat_template"];
  if (json.is_string()) return json.get<std::string>();
  if (!json.is_array()) return "";
  for (const Json& entry : json) {
    if (entry.is_object() && entry.contains("name") && entry["name"] == "default" &&
        entry.contains("template") && entry["template"].is_string()) {
      return entry["template"].get<std::string>();
    }
  }
  return "";
}

}  // namespace

Status tokenizer_from_json(const std::string& file, const Json& json, const Json* config,
                           std::unique_ptr<Tokenizer>* tokenizer) {
  auto made = std::make_unique<TextTokenizer>();
  static const Json kNone;
  const auto part = [&](const char* name) -> const Json& {
    const auto found = json.find(name);
    return found == json.end() ? kNone : *found;
  };
  FK_RETURN_IF_ERROR(
      each_part(file, "normalizer", "normalizers", part("normalizer"),
                [&](const Json& p) { return read_normalizer(file, p, made.get()); }));
  FK_RETURN_IF_ERROR(
      each_part(file, "pre_tokenizer", "pretokenizers", part("pre_tokenizer"),
                [&](const Json& p) { return read_pre_tokenizer(file, p, made.get()); }));
  if (!json.contains("model")) return file_error(file, "model: is missing");
  FK_RETURN_IF_ERROR(read_model(file, json["model"], made.get()));
  FK_RETURN_IF_ERROR(read_added(file, part("added_tokens"), made.get()));
  FK_RETURN_IF_ERROR(each_part(file, "decoder", "decoders", part("decoder"),
                               [&](const Json& p) { return read_decoder(file, p, made.get()); }));
  FK_RETURN_IF_ERROR(
      each_part(file, "post_processor", "processors", part("post_processor"),
                [&](const Json& p) { return read_post_processor(file, p, made.get()); }));
  const Status status = made->finish();
  if (!status.ok()) return file_error(file, status.message());
  made->bos = find_named(config, "bos_token", *made);
  if (const int32_t eos = find_named(config, "eos_token", *made); eos >= 0) made->eos = {eos};
  made->chat_template = find_template(config);
  set_chat(made.get());
  *tokenizer = std::move(made);
  return {};
}

}  // namespace fk::model
