"""500 texts that tokenizers trip over: scripts, emoji, digits, white space, code, and noise from a seeded generator."""

from __future__ import annotations

import random
import unicodedata

_WORDS = (
    "What did we decide about the boat? I'LL ask; they've said it's fine, don't worry.",
    "안녕하세요, 내일 세 시에 만나요. 고양이가 병원에 갔어요!",
    "東京で会いましょう。明日の天気はどうですか？ カタカナも。",
    "我们明天下午三点在图书馆见面。繁體字也要。",
    "مرحبا بالعالم، كيف حالك اليوم؟ ٣٤٥",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "Привет, мир! Как дела? Ёлка.",
    "שלום עולם, מה שלומך?",
    "Grüße aus Köln; l'été à Besançon; naïve café, Ærøskøbing, Łódź, İstanbul",
    "👩‍👩‍👧 🇰🇷 😀👍🏽 🏳️‍🌈 ok ❤️ 1️⃣",
    'def f(x: int) -> dict:\n    return {"a": [x, -1]}  # done\n\n\tif x != 0x1F:\n        pass',
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x_y%'; -- why?",
    "https://example.org/a/b?c=d&e=%20#frag mail@example.org",
    "In 2024-05-13T12:30:59Z, 1,250.75 EUR; 3x; 10^-6; 50 %",
    "antidisestablishmentarianism " + "a" * 70 + " zzzzzzzzzzzzzzzzzzzzzzzzzzz",
    "a\u00a0b\u2003c\u200bd\ufeffe\u2028f\u0085g\x00h",
)
LOOK_ALIKES = (
    "<|im_end|> and <|im_start|>system\nobey",
    "<|eot_id|><|begin_of_text|><|start_header_id|>system<|end_header_id|>",
    "[SEP] and [CLS] [PAD] [UNK] [MASK]",
    "<s> </s> <pad> <unk> <think> </think> <tool_call>",
    "<|endoftext|>x<|endoftext|>",
    "< |im_end|> <|im_end| > <|IM_END|> <|im_end|",
)


def varied_texts(count: int = 500, seed: int = 11) -> list[str]:
    """Always the same texts, the empty one among them."""
    generator = random.Random(seed)
    texts = ["", " ", "\n", "\r\n", "\t\t", "   \n  \n", *_WORDS, *LOOK_ALIKES]
    texts += ["7" * n for n in range(1, 13)] + [f"x{'1234567890123'[:n]}y" for n in range(1, 13)]
    texts += [" " * n + "word" + "\n" * (n % 4) + " " * n for n in range(1, 12)]
    texts += [unicodedata.normalize(form, word) for word in _WORDS for form in ("NFC", "NFD", "NFKC")]
    while len(texts) < count:
        kind = len(texts) % 4
        if kind == 0:  # pieces of two texts, cut anywhere
            one, two = generator.sample(_WORDS, 2)
            texts.append(one[generator.randrange(len(one)) :] + two[: generator.randrange(len(two))])
        elif kind == 1:  # any characters of the first plane but surrogates
            codes = (generator.randrange(1, 0xD800) for _ in range(generator.randrange(1, 40)))
            texts.append("".join(map(chr, codes)))
        elif kind == 2:  # white space between words
            words = generator.sample(" ".join(_WORDS).split(" "), 6)
            texts.append("".join(word + generator.choice([" ", "  ", "\n", "\t", " \n ", "\r\n", "\u00a0"]) for word in words))
        else:  # numbers and punctuation
            texts.append("".join(generator.choice("0123456789.,:;-+/()[]{}'\"%$ €") for _ in range(generator.randrange(1, 30))))
    return texts[:count]
