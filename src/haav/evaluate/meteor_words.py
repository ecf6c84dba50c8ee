"""Split text into words like the jar of METEOR (`-norm`)."""

from __future__ import annotations

import re
from itertools import zip_longest

_ALPHA = "A-Za-zŠŽšžŸÀ-ÖØ-öø-žЀ-ӿԀ-ԧꙀ-ꙮ꙾-ꚗᴀ-ᵿ"
_ALNUM = "0-9" + _ALPHA
_DOT = "\ue000"  # stands for the dots of "...", which no rule may touch
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"([^{_ALNUM} \t\n\x0b\f\r.'`,‘’-])", r" \1 "),
        (r"\.{2,}", lambda dots: f" {_DOT * len(dots[0])} "),
        (r"([^0-9]),([^0-9])", r"\1 , \2"),
        (r"([0-9]),([^0-9])", r"\1 , \2"),
        (r"([^0-9]),([0-9])", r"\1 , \2"),
        (r"[`‘’]", "'"),
        (r"[“”]|''", ' " '),
        (r"–", "-"),
        (r"--", "-"),
        (rf"([{_ALNUM}.])-([{_ALNUM}])", r"\1 \2"),
        (rf"([^{_ALPHA}])'([^{_ALPHA}])", r"\1 ' \2"),
        (rf"([^{_ALPHA}0-9])'([{_ALPHA}])", r"\1 ' \2"),
        (rf"([{_ALPHA}])'([^{_ALPHA}])", r"\1 ' \2"),
        (rf"([{_ALPHA}])'([{_ALPHA}])", r"\1 '\2"),
        (r"([0-9])'(s)", r"\1 '\2"),
    )
]
_PLAIN = re.compile("[0-9a-z ]*")
_LETTER = re.compile(f"[{_ALPHA}]")
_TOKEN = re.compile(r"[^ \t\n\r\f]+")
_WORD = re.compile("[^ \t\n\r\f\u2000-\u200a\u202f\u205f\u3000\xa0]+")


def normalize(text: str, prefixes: dict[str, bool]) -> list[str]:
    """The `-norm` of the jar: separates punctuation, removes hyphens and dots of abbreviations, and lowercases.

    It also changes output of the PTB tokenizer: "t-shirt" becomes two words, "u.s." becomes one.
    """
    if _PLAIN.fullmatch(text):
        return text.split()
    text = f" {text} "
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    tokens = _TOKEN.findall(text)
    words = []
    for token, following in zip_longest(tokens, tokens[1:], fillvalue=""):
        if len(token) > 1 and token.endswith("."):
            token = _final_dot(token[:-1], following, prefixes)
        words.append(token)
    return _WORD.findall(" ".join(words).replace(_DOT, ".").lower())


def _final_dot(prefix: str, following: str, prefixes: dict[str, bool]) -> str:
    """`prefix` with or without its dot. An abbreviation loses all dots. The dot of a sentence is a separate word."""
    if "." in prefix and _LETTER.search(prefix):
        return prefix.replace(".", "")
    only_before_digits = prefixes.get(prefix)
    if (
        only_before_digits is False
        or "a" <= following[:1] <= "z"
        or (only_before_digits and "0" <= following[:1] <= "9")
    ):
        return prefix + "."
    return prefix + " ."
