"""Small tokenizers of each kind, trained here on a few sentences; each stands for a family of models."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind.",
    "Wörter mit Umlauten, naïve café, 日本語のテキスト、中文字符。",
    "Emoji 😀 and families 👩‍👩‍👧, and numbers 1234567890!",
] * 20
END = "<|end|>"


def byte_level() -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    library.train_from_iterator(SENTENCES, trainer)
    library.add_tokens(["two words", "é"])  # one that has a space, and one that is a stand-in for another byte
    return library


def byte_level_in_a_sequence() -> Tokenizer:
    """As DeepSeek's."""
    library = byte_level()
    library.decoder = decoders.Sequence([decoders.ByteLevel()])
    return library


def sentence_piece() -> Tokenizer:
    """As Llama 2's and Mistral's: ▁ for a space, a token for each byte of a rare character."""
    vocabulary: list[tuple[str, float]] = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyzTE.,!'", "▁The", "▁dog", "▁qu", "ick", "▁the", "ing", "▁▁", "é", "日"]
    vocabulary += [(piece, -1.0 - len(piece) / 8) for piece in pieces]
    library = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def without_strip() -> Tokenizer:
    """As Gemma's."""
    library = sentence_piece()
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


def metaspace() -> Tokenizer:
    """As T5's and XLM-R's."""
    library = Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(SENTENCES, trainer)
    return library


def word_piece() -> Tokenizer:
    """As BERT's."""
    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    library.train_from_iterator(SENTENCES, trainer)
    library.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return library


def with_suffix() -> Tokenizer:
    """As GPT's, the first: the end of a word is marked."""
    library = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    library.train_from_iterator(SENTENCES, trainer)
    return library


def without_decoder() -> Tokenizer:
    """Whose tokens the library joins with spaces."""
    library = metaspace()
    library.decoder = None
    return library


def mixed() -> Tokenizer:
    """Bytes by stand-ins, and a step after that."""
    library = byte_level()
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return library


KINDS: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: functools.cache(make)
    for make in (
        byte_level,
        byte_level_in_a_sequence,
        sentence_piece,
        without_strip,
        metaspace,
        word_piece,
        with_suffix,
        without_decoder,
        mixed,
    )
}
