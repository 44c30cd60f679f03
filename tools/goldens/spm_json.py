"""Writes model/testdata/spm_json.json: a small BPE of SentencePiece's kind (spaces as U+2581, bytes as
<0x0A>), the parts of tokenizer.json around it as models have them, and ids and texts by the `tokenizers`
package (0.23) under each:

  legacy   Llama 2 and Mistral as published: Prepend and Replace
  llama    what transformers 5 writes of a LlamaTokenizer: Metaspace, before the first text alone
  gemma    what transformers 5 writes of a GemmaTokenizer: Replace, no space before
  always   Metaspace before every text, words apart, no bytes to fall back on, unknown characters fused
  plain    the same without unknown: characters without a token are left out

    pip install tokenizers transformers && python3 tools/goldens/spm_json.py
"""

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, LlamaTokenizer

ROOT = pathlib.Path(__file__).parent.parent.parent
SPACE = "\u2581"
TEXTS = [
    "Hello world", "", " ", "  ", " leading", "trailing ", "  two  spaces  ", "line\n\n  next\r\nlast \n", "\tx",
    "<s>", "<s>Hello</s> world", "a <tool> b", "<tool>x<tool> y", " <tool> <s> <tool>", "a<s> b<s>c", "</s>  <s>",
    "\u00dcn\u00efc\u00f6d\u00e9 caf\u00e9", "\u65e5\u672c\u8a9e text", "\U0001f600\U0001f600 ok \u2603", "\u2581", "a\u2581b",
    "1 22 333", "don't e\u0301", "<0x0A>", "hello hello hello", "\u00a0nbsp", "x\u0000y", "Question: What?\nAnswer: ab",
]


def train():
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=460, show_progress=False, min_frequency=1,
        special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)])
    tokenizer.train_from_iterator([t for t in TEXTS if t.isascii() and "<" not in t] * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


def tokenizer_of(name, vocab, merges):
    if name in ("llama", "gemma"):
        kind = LlamaTokenizer if name == "llama" else GemmaTokenizer
        return kind(vocab=vocab, merges=merges, bos_token="<s>", eos_token="</s>",
                    pad_token="<unk>", mask_token="<unk>")._tokenizer
    model = models.BPE(vocab=vocab, merges=merges, fuse_unk=True,
                       unk_token=None if name == "plain" else "<unk>", byte_fallback=name == "legacy")
    tokenizer = tokenizers.Tokenizer(model)
    if name == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def main():
    vocab, merges = train()
    cases = {}
    for name in ("legacy", "llama", "gemma", "always", "plain"):
        tokenizer = tokenizer_of(name, vocab, merges)
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.add_tokens(["<tool>"])
        whole = json.loads(tokenizer.to_str())
        parts = {k: v for k, v in whole.items() if k not in ("version", "truncation", "padding")}
        for key in ("vocab", "merges"):
            del parts["model"][key]
        ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
        cases[name] = {"parts": parts, "ids": ids,
                       "decoded": [tokenizer.decode(i, skip_special_tokens=False) for i in ids]}
    path = ROOT / "model/testdata/spm_json.json"
    kept = [("vocab", vocab), ("merges", merges), ("texts", TEXTS), ("cases", cases)]
    path.write_text("{" + ",\n".join(f'"{n}": {json.dumps(v)}' for n, v in kept) + "}\n")
    print(path, path.stat().st_size, "bytes")


main()
