"""The English Snowball stemmer ("Porter2", Porter 2001), as METEOR 1.5 ships it.

Later Snowball releases changed a few rules, so a stemmer from elsewhere would not give METEOR's stems.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

VOWELS = frozenset("aeiouy")
DOUBLES = ("bb", "dd", "ff", "gg", "mm", "nn", "pp", "rr", "tt")
BEFORE_LI = frozenset("cdeghkmnrt")

IRREGULAR = {
    "skis": "ski", "skies": "sky", "dying": "die", "lying": "lie", "tying": "tie", "idly": "idl", "gently": "gentl",
    "ugly": "ugli", "early": "earli", "only": "onli", "singly": "singl",
} | {word: word for word in ("sky", "news", "howe", "atlas", "cosmos", "bias", "andes")}  # fmt: skip
KEPT = frozenset(("inning", "outing", "canning", "herring", "earring", "proceed", "exceed", "succeed"))

STEP_2 = {
    "tional": "tion", "enci": "ence", "anci": "ance", "abli": "able", "entli": "ent", "izer": "ize", "ization": "ize",
    "ational": "ate", "ation": "ate", "ator": "ate", "alism": "al", "aliti": "al", "alli": "al", "fulness": "ful",
    "ousli": "ous", "ousness": "ous", "iveness": "ive", "iviti": "ive", "biliti": "ble", "bli": "ble", "ogi": "og",
    "fulli": "ful", "lessli": "less", "li": "",
}  # fmt: skip
STEP_3 = {
    "tional": "tion", "ational": "ate", "alize": "al", "icate": "ic", "iciti": "ic", "ical": "ic", "ful": "",
    "ness": "", "ative": "",
}  # fmt: skip
STEP_4 = dict.fromkeys(
    ("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ism", "ate", "iti", "ous",
     "ive", "ize", "ion"), "",
)  # fmt: skip

# Region R1 (and R2 within R1) starts after the first consonant that follows a vowel.
_REGION = re.compile("[aeiouy].*?[^aeiouy]", re.DOTALL)
_SPECIAL_REGION = re.compile("gener|commun|arsen")


def stem(word: str) -> str:
    """A lower-case word without its endings: `running` → `run`, `happily` → `happili`."""
    if word in IRREGULAR or len(word) < 3:
        return IRREGULAR.get(word, word)
    word = _mark_consonant_y(word.removeprefix("'"))
    first = _SPECIAL_REGION.match(word) or _REGION.search(word)
    r1 = first.end() if first else len(word)
    second = _REGION.search(word, r1)
    r2 = second.end() if second else len(word)

    word = _step_1a(word)
    if word not in KEPT:
        word = _step_1b(word, r1)
        if len(word) > 2 and word[-1] in "yY" and word[-2] not in VOWELS:
            word = word[:-1] + "i"
        word = _step_2(word, r1)
        word = _step_3(word, r1, r2)
        word = _step_4(word, r2)
        word = _step_5(word, r1, r2)
    return word.replace("Y", "y")


def _mark_consonant_y(word: str) -> str:
    """Write Y for a y that is a consonant: at the start of a word, or after a vowel."""
    letters = list(word)
    for index, letter in enumerate(letters):
        if letter == "y" and (index == 0 or letters[index - 1] in VOWELS):
            letters[index] = "Y"
    return "".join(letters)


def _longest(word: str, endings: Iterable[str]) -> str:
    return max((ending for ending in endings if word.endswith(ending)), key=len, default="")


def _has_vowel(part: str) -> bool:
    return not VOWELS.isdisjoint(part)


def _ends_short(word: str) -> bool:
    """Whether the last syllable is short: consonant, vowel, consonant but w, x, Y; or a word of vowel, consonant."""
    if len(word) < 2 or word[-1] in VOWELS or word[-2] not in VOWELS:
        return False
    return len(word) == 2 or (word[-1] not in "wxY" and word[-3] not in VOWELS)


def _step_1a(word: str) -> str:
    word = word.removesuffix(_longest(word, ("'", "'s", "'s'")))
    if word.endswith("sses"):
        return word[:-2]
    if word.endswith(("ied", "ies")):
        return word[:-2] if len(word) > 4 else word[:-1]
    if word.endswith("s") and not word.endswith(("us", "ss")) and _has_vowel(word[:-2]):
        return word[:-1]
    return word


def _step_1b(word: str, r1: int) -> str:
    ending = _longest(word, ("eed", "eedly", "ed", "edly", "ing", "ingly"))
    base = word.removesuffix(ending)
    if ending in ("eed", "eedly"):
        return base + "ee" if len(base) >= r1 else word
    if not ending or not _has_vowel(base):
        return word
    if base.endswith(("at", "bl", "iz")):
        return base + "e"
    if base.endswith(DOUBLES):
        return base[:-1]
    return base + "e" if len(base) == r1 and _ends_short(base) else base


def _step_2(word: str, r1: int) -> str:
    ending = _longest(word, STEP_2)
    base = word.removesuffix(ending)
    if not ending or len(base) < r1:
        return word
    if (ending == "ogi" and not base.endswith("l")) or (ending == "li" and base[-1:] not in BEFORE_LI):
        return word
    return base + STEP_2[ending]


def _step_3(word: str, r1: int, r2: int) -> str:
    ending = _longest(word, STEP_3)
    base = word.removesuffix(ending)
    if not ending or len(base) < (r2 if ending == "ative" else r1):
        return word
    return base + STEP_3[ending]


def _step_4(word: str, r2: int) -> str:
    ending = _longest(word, STEP_4)
    base = word.removesuffix(ending)
    if not ending or len(base) < r2 or (ending == "ion" and not base.endswith(("s", "t"))):
        return word
    return base


def _step_5(word: str, r1: int, r2: int) -> str:
    base = word[:-1]
    if word.endswith("e") and (len(base) >= r2 or (len(base) >= r1 and not _ends_short(base))):
        return base
    if word.endswith("ll") and len(base) >= r2:
        return base
    return word
