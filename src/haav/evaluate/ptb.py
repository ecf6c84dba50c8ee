"""The tokenizer of the COCO caption tools, without Java.

These tools run the Penn Treebank tokenizer of CoreNLP 3.4.1 with `-preserveLines -lowerCase`, then drop punctuation.
Published scores depend on its oddities: "(" is the word "-lrb-", "¢" is "cents", and an emoji is nothing. The rules
here reproduce them. `tests/evaluate/test_ptb.py` compares them with the original.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

# As in pycocoevalcap. Brackets arrive in lower case there, so they do not match and are kept.
PUNCTUATION = frozenset(["''", "``", "--", "...", "-LRB-", "-RRB-", "-LCB-", "-RCB-", *"'`.?!,:-;"])


def tokenize(caption: str) -> list[str]:
    """Words in lower case without punctuation. Joined by spaces, they are the input of pycocoevalcap's metrics.

    A word may contain a no-break space ("2 1/2"). In three cases the result of Java depends on the captions around:
    - Whether a final "b." keeps its full stop depends on the next caption. Here that is assumed to begin with "A ".
    - An open `<a b="` extends into later captions up to the next quote. Here it is read as plain marks.
    - A line break other than a newline shifts later captions by a line. Here it separates words like a space.
    """
    text = caption.replace("\n", " ")
    if _PLAIN.fullmatch(text):
        return [word for chunk in text.split() for word in _read_chunk(chunk)]
    return _read(text)


def _read(text: str) -> list[str]:
    if text.isascii():
        joined = " ".join(_words(text))
    else:  # Java reads an astral character as two
        halves = re.sub(r"[^\0-\uffff]", lambda astral: _surrogates(ord(astral[0])), text)
        joined = " ".join(_words(halves)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return [word for word in joined.lower().rstrip().split(" ") if word and word not in PUNCTUATION]


# Matches most captions. No rule that begins with these characters extends past a space, so chunks are independent.
_PLAIN = re.compile(r"[A-Za-z',\- ]*\.? *")
_read_chunk = lru_cache(maxsize=1 << 16)(_read)


def _surrogates(code: int) -> str:
    return chr(0xD7C0 + (code >> 10)) + chr(0xDC00 + (code & 0x3FF))


def _words(text: str) -> Iterator[str]:
    """Apply the rule with the longest match at each position, including its lookahead. The first rule wins ties."""
    (first, rules), size, start = _lexer(), len(text), 0
    text += "\nA "
    while start < size:
        state, end, rule = first, start + 1, None
        for place in range(start, len(text)):
            state = state[text[place]]
            if state.rule is not None:
                end, rule = place + 1, rules[state.rule]
            elif not state.places:
                break
        if rule:  # otherwise a character that Java drops
            end = rule.end(text, start, end)
            if word := rule.spell(text[start:end]):
                yield word
        start = end


# ---- How a match is spelt --------------------------------------------------------------------------------------------

_SPELLING = {
    **{"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"},
    **{"¼": "1/4", "½": "1/2", "¾": "3/4", "⅓": "1/3", "⅔": "2/3", "¢": "cents", "£": "#"},
    **{" ": "\xa0", "\xad": "", "&lt;": "<", "&gt;": ">", "&amp;": "&", "…": "...", "\x85": "..."},
    **dict.fromkeys(["---", "----", "–", "—", "―", "\x96", "\x97", "&md;", "&mdash;", "&ndash;"], "--"),
    **dict.fromkeys("\x80¤₠€", "$"),
    **dict.fromkeys("\x91‘‛‹", "`") | dict.fromkeys(["&apos;", *"\x92’›"], "'"),
    **dict.fromkeys("\x93“«", "``") | dict.fromkeys(["&quot;", *'"\x94”»'], "''"),
}


def _respell(what: str) -> Callable[[str], str]:
    """A function that replaces matches of a pattern by their spelling, if it differs."""
    return partial(re.compile(what).sub, lambda match: _SPELLING.get(match[0].lower(), match[0]))


_keep = str
_whole = _respell("(?s).+")
_quote = _respell("&apos;|&quot;|[^&]")
_ampersand = _respell("(?i)&amp;")
_soft_hyphen = _respell("\xad")
_no_break = _respell(" ")
_face = _respell("[()]")
_phone = _respell("[() ]")
_ellipsis = partial(re.compile(".+").sub, "...")
_nothing = partial(re.compile(".+").sub, "")


# ---- What is matched -------------------------------------------------------------------------------------------------
# A pattern is a regular expression of few means: `( | )`, `* + ? {m,n}`, `[sets]`, `\l` for a letter, `\d` for a digit
# and `{name}` for a part named here. Characters match in either case, those in sets only as written.

# The original was built with Unicode 6.2. Letters and digits that were added later are not letters or digits to it.
_LATER = re.compile(
    r"[\u037f\u0528-\u052f\u0560\u0588\u05ef\u0860-\u089f\u08a1\u08ad-\u08ff\u0978\u0980\u09fc\u0af9\u0c34\u0c5a-\u0c5f"
    r"\u0c80\u0cdc\u0cdd\u0d04\u0d54-\u0d56\u0d5f\u0de6-\u0def\u0e86\u0e89\u0e8c\u0e8e-\u0e93\u0e98\u0ea0\u0ea8\u0ea9"
    r"\u0eac\u13f5-\u13ff\u16f1-\u16f8\u170d\u171f\u1878\u191d\u191e\u19b0-\u19c0\u19c8\u19c9\u1b4c\u1c80-\u1cbf\u1cf2"
    r"\u1cf3\u1cfa\u2c2f\u2c5f\u312e\u312f\u31bb-\u31bf\u4db6-\u4dbf\u9fcd-\u9fff\ua698-\ua69f\ua78f\ua794-\ua79f"
    r"\ua7ab-\ua7f7\ua8fd\ua8fe\ua9e0-\ua9fe\uaa7e\uaa7f\uab30-\uabbf\U00010000-\U0010ffff]"
)


def _is_letter(char: str) -> bool:
    return (char.isalpha() and not _LATER.match(char)) or char in "\u1885\u1886"  # letters until Unicode 9


def _is_digit(char: str) -> bool:
    return char.isdecimal() and not _LATER.match(char)


# Accents, vowel signs and some punctuation that count as letters within a word.
_MARKS = (
    r"\xad\u02c2-\u02c5\u02d2-\u02df\u02e5-\u036f\u0375\u0378\u0379\u0384\u0385\u03f6\u0483-\u0487\u055a-\u055f"
    r"\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0615-\u061a\u064b-\u065e\u0670\u06d6-\u06ed\u06fd\u06fe\u070f"
    r"\u0711\u0730-\u074c\u07a6-\u07b0\u07eb-\u07f3\u0900-\u0903\u093c\u093e-\u094e\u0951-\u0955\u0962\u0963"
    r"\u0981-\u0983\u09bc\u09be-\u09c4\u09c7\u09c8\u09cb-\u09cd\u09d7\u09e2\u09e3\u0a01-\u0a03\u0a3c\u0a3e-\u0a4f"
    r"\u0a81-\u0a83\u0abc\u0abe-\u0acf\u0b82\u0bbe-\u0bc2\u0bc6-\u0bc8\u0bca-\u0bcd\u0c01-\u0c03\u0c3e-\u0c56"
    r"\u0d3e-\u0d44\u0d46-\u0d48\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ecd"
)
# Each symbol is a word.
_SYMBOLS = (
    r".,;:()[\]{}<>%+&~^|\\=/\x80\x85\x96\x97¡-©¬®-±´¶-¸¼-¿×÷\u037e\u0387\u0589\u05be\u05c0\u05c3\u05c6\u05f3\u05f4"
    r"\u0600-\u0603\u0606-\u060c\u0614\u061b\u061e\u061f\u066a\u066d\u06d4\u0700-\u070d\u07f6-\u07f8\u0964\u0965\u0e3f"
    r"\u0e4f\u1fbd\u2013-\u2017\u2020-\u2023\u2026\u2030-\u2038\u203b\u203e-\u2042\u2044\u207a-\u207e\u208a-\u208e\u20a0"
    r"\u20a4\u20ac\u2100-\u214f\u2153-\u215e\u2190-\u2bff\u3001\u3002\u3012\u30fb\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40"
    r"\uff5b-\uff65\uffe0\uffe1\uffe5\uffe6"
)


def _any(words: str) -> str:
    """A pattern for any of the words. A capital letter matches only a capital letter."""
    return "|".join(re.sub("^[A-Z]", r"[\g<0>]", word) for word in words.split())


_ENDS = r' \t\n\f\r"<>|()'  # where an address ends
_LOOSE = r".!?{},"  # marks that usually belong to the sentence, not to the address

_PARTS = {
    "letter": rf"\l|&[aeiouAEIOU](acute|grave|uml);|[{_MARKS}]",
    "word": r"{letter}({letter}|\d)*([.!?]{letter}({letter}|\d)*)*",
    "apostrophe": r"['\x92’]|&apos;",
    "tick": r"{apostrophe}|[`\x91‘‛]",
    "ending": r"{apostrophe}([msdMSD]|re|ve|ll)",
    "not": r"n{tick}t",
    "space": r"[ \t\xa0\u2000-\u200a\u3000]",
    "gap": r"{space}|[\n\v\f\r\x85\u2028\u2029]",
    "pause": r"[,;:、]",
    # compounds: d'Arc-et-Senans, 3.5-inch, and/or
    "piece": r"([dDoOlL]{tick}(\l|\d))?(\l|\d)+",
    "pieces": r"{piece}([-_\u058a\u2010\u2011]{piece})*",
    "hyphened": r"[A-Za-z0-9][A-Za-z0-9.,\xad]*(-([A-Za-z0-9\xad]+|([A-Za-z](\.[A-Za-z])+|{nations})\.))+",
    "slashed": r"[A-Za-z0-9]+(-[A-Za-z]+){0,2}",
    "company": r"[A-Z]+((\+|&|&amp;)[A-Z]+)+",
    # tags, addresses, files
    "name": r"[A-Za-z][A-Za-z0-9_:.\-]*",
    "tag": r"""<([!?][A-Za-z\-][^>\r\n]*|/{name}|{name}( +{name}( *= *("[^"]*"|'[^']*'))?)* */?) *>""",
    "path": rf"/[^{_ENDS}]+[^{_ENDS}{_LOOSE}\-]",
    "mailbox": rf"[a-zA-Z0-9][^{_ENDS}{{}}\xa0]*",
    "domain": rf"[^{_ENDS}{{}}\xa0.]+",
    "file": r"({letter}|\d)+(\.({letter}|\d)+)*\.({extension})",
    "extension": _any(
        "bat bmp c cgi class cpp dll docx? exe gif gz h html? jar java jpe?g mov mp3 pdf php pl png ppt ps py sql tar "
        "txt wav x xml zip"
    ),
    # abbreviations: before anything, as a title, before a number
    "nations": r"(Canada|EU|Japan|Korean|non|Sino)-U\.S|U\.S\.-U\.(K|S\.S\.R)",
    "shortened": _any(
        r"al ala apr ariz Ark assn aug Az bancorp bhd bldg blvd bros calif colo conn corp cos? ct dak dec Del ed\.d "
        r"esq est etc ext feb fla fri ga Ill inc ind intl jan jr jul jun kans? ky La ltd mar Mass md mich minn Miss mo "
        r"mon mont neb nev nov oct okla Ore Pa penn ph\.d plc pp?t[ey]s? rd rt sept? seq sq sr sys tel tenn Tex thu "
        r"thurs tues? univ va vt Wash wed wisc? wyo"
    ),
    "titled": _any(
        r"a\.k\.a adj adm adv alex assoc asst attys? ave brig capt cf cie co?mdr col cpl dept det drs? elec ens ft gen "
        r"govs? hon insp invt jos lieut lt m[ft]g maj messrs Miss mlle mme mr mrs ms msgr mt natl pfc ph pres profs? "
        r"pvt reps? rev sens? sfc sgt spc ste? supts? treas vs wm"
    ),
    "numbered": _any("art bldg ca figs? nos? op pp prop"),
    # words that begin a sentence, so that a letter before them gives up its full stop
    "opening": _any(
        r"A About According Additionally After An As At But Earlier He Her Here However If In It Last Many More Mr\. "
        r"Ms\. Now Once One Other Our She Since So Some Such That The Their Then There These They This We What When "
        r"While Yet You"
    ),
    "eye": r"[\-\^x=~<>']",
}

# (pattern, what must follow but is left for the next word, how to spell the match)
_TABLE: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    (r"c\+\+|c#|f#", "", _keep),
    (r"can", "not", _keep),
    (r"gon|wan", "na", _keep),
    (r"got", "ta", _keep),
    (r"gim|lem", "me", _keep),
    (r"'t", "is|was", _keep),
    (r"{tag}", "", _no_break),
    (r"&(HT|TL|(U|L)R|Q(C|L|R)|(o|c)dq|#[0-9]+);", "", _keep),
    # words: man 's, do n't, 'em, o'clock, c'mon, y' all
    (r"{word}", "{ending}", _soft_hyphen),
    (r"[A-Za-z\xad]*[A-MO-Za-mo-z][\xad]*", "{not}", _soft_hyphen),
    (r"{word}", "", _soft_hyphen),
    (r"{apostrophe}(n{apostrophe}?|em|[2-9]0s|till?|cause)|([lLdDjJ]|Dunkin|somethin|ol){apostrophe}", "", _keep),
    (r"[A-HJ-XZn]{tick}\l\l+|\l+[aeiouyAEIOUY]{tick}[aeiouA-Z]\l*|o{tick}o", "", _keep),
    (r"c'mon|cont'd\.?|e'er|ev'ry|li'l|nat'l|nor'easter|s'mores", "", _keep),
    (r"y{apostrophe}", r"\l", _keep),
    # on the net; the name of a host with neither www nor http has no capital or digit, a slip in the original
    (rf"https?://[^{_ENDS}{{}}]+[^{_ENDS}{_LOOSE}\-]", "", _keep),
    (rf"www\.([^{_ENDS}{_LOOSE}]+\.)+[a-zA-Z]{{2,4}}({{path}})?", "", _keep),
    (rf"([^{_ENDS}{_LOOSE}`'$,-_]+\.)+(com|edu|net|org)({{path}})?", "", _keep),
    (r"(<|&lt;)?{mailbox}@({domain}\.)*{domain}(>|&gt;)?", "", _keep),
    (r"@[a-zA-Z_][a-zA-Z_0-9]*|#{letter}+", "", _keep),
    (r"{ending}|{not}", r"[^A-Za-z]", _quote),
    (r"{not}", "", _quote),
    # numbers
    (r"\d{1,2}[\-/]\d{1,2}[\-/]\d{2,4}", "", _keep),
    (r"[\-+]?(\d+|[.:,\xad\u066b\u066c]\d+)([.:,\xad\u066b\u066c]\d+)*", "", _soft_hyphen),
    (r"[\u207a\u207b\u208a\u208b]?([⁰¹²³⁴-⁹]+|[₀-₉]+)", "", _keep),
    (r"(\d{1,4}[ \xa0\-])?\d{1,4}(\\?/|⁄)\d{1,4}", "", _no_break),
    # words with other marks in them
    (r"-(L|R)(R|C|S)B-|C\.D\.s|pro-|anti-|S(&|&amp;)(Ls|P-500)|c{apostrophe}est|Cap{apostrophe}n", "", _ampersand),
    (r"{slashed}(\\?/{slashed}){1,2}", "", _keep),
    (r"[A-Z]*\$", "", _keep),
    # abbreviations and what else keeps its full stop
    (r"[A-Za-z]", r"\.{gap}+({opening}|{tag}){gap}", _keep),
    (r"({numbered})\.", r"{gap}?\d", _keep),
    (r"(pt[eyEY]|co)\.", r"{space}(ltd|lim)", _keep),
    (r"({shortened})\.", r"[\0-\uffff][\0-\uffff]", _keep),
    (r"({titled}|[A-Za-z](\.[A-Za-z])*|{nations})\.", "", _keep),
    (r"{nations}", "{gap}", _keep),
    (r"{apostrophe}[0-9][0-9]", "{gap}", _keep),
    (r"{file}", r"{gap}|[.?!,]", _keep),
    (r"({word}|{hyphened}|{pieces})\.", "{pause}", _soft_hyphen),
    (r"(\([0-9]{2,3}\)[ \xa0]?|(\+\+?)?([0-9]{2,4}[ \xa0\-]){1,2})[0-9]{3,4}[ \xa0\-]?[0-9]{3,5}", "", _phone),
    (r"((\+\+?)?[0-9]{2,4}\.)?[0-9]{2,4}\.[0-9]{3,4}\.[0-9]{3,5}", "", _phone),
    # runs of a mark
    (r"-+", "", _whole),
    (r"\.{3,5}|(\.[ \xa0]){2,4}\.", "", _ellipsis),
    (r"@+|#+|_+|\*+|(\\\*){1,3}|[?!]+|<<|>>", "", _keep),
    # ^_^ (-.-) (^-^), and what a slip in the original makes of x.x
    (r"{eye}_{eye}|\({eye}[_.]?{eye}\)|\([\^x=~<>']-[\^x=~<>'`]\)|[\^x=~<>]\.\[\^x=[^<]*<>\]", "", _face),
    (r"{hyphened}|{pieces}", "", _soft_hyphen),
    (r"{company}\.", "{pause}", _ampersand),
    (r"{company}", "", _ampersand),
    (r"[<>]?[:;=][\-o*']?[()DPdpO\\{@|\[\]]", r"[^A-Za-z0-9]", _face),
    # quotes, and what remains
    (r"'", r"[A-Za-z][^ \t\n\r\xa0]", _quote),
    (r"""{ending}|{apostrophe}|''|"|&quot;|[`‘’‚‛“”„‟‹›«»\x91-\x94]{1,2}""", "", _quote),
    (rf"&(lt|gt|amp|MD|mdash|ndash);|[{_SYMBOLS}]", "", _whole),
    (r"{space}+|&nbsp;", "", _nothing),
)


# ---- How it is matched -----------------------------------------------------------------------------------------------
# Regular expressions in Python take the first alternative that matches, not the longest. So the table is compiled into
# one automaton, which is made deterministic lazily. After a few captions, a step is a lookup in a dict.


class _Place:
    """A state of the nondeterministic automaton: its transitions, its free transitions, and the rule that ends here."""

    def __init__(self) -> None:
        self.steps: list[tuple[Callable[[str], object], _Place]] = []
        self.free: list[_Place] = []
        self.rule: int | None = None


class _State(dict[str, "_State"]):
    """A deterministic state: the set of places that the text may have led to. Maps a character to the next state."""

    def __init__(self, places: frozenset[_Place]) -> None:
        reached, todo = set(places), list(places)
        while todo:
            new = set(todo.pop().free) - reached
            reached |= new
            todo += new
        self.places = [place for place in reached if place.steps]
        self.rule = min((place.rule for place in reached if place.rule is not None), default=None)

    def __missing__(self, char: str) -> _State:
        self[char] = after = _state(frozenset(new for place in self.places for fits, new in place.steps if fits(char)))
        return after


_state = cache(_State)


class _Rule(NamedTuple):
    spell: Callable[[str], str]
    head: _State
    ahead: _State | None

    def end(self, text: str, start: int, end: int) -> int:
        """End of the head in the match text[start:end]. If several ends are possible, the longest head."""
        if self.ahead is None:
            return end
        cuts = range(end, start, -1)
        return next(cut for cut in cuts if _fits(self.ahead, text[cut:end]) and _fits(self.head, text[start:cut]))


def _fits(state: _State, text: str) -> bool:
    for char in text:
        state = state[char]
    return state.rule is not None


@cache
def _lexer() -> tuple[_State, list[_Rule]]:
    rules = [_Rule(spell, _automaton(head), _automaton(ahead) if ahead else None) for head, ahead, spell in _TABLE]
    return _automaton(*(f"({head})({ahead})" for head, ahead, _ in _TABLE)), rules


def _automaton(*patterns: str) -> _State:
    start = _Place()
    for index, pattern in enumerate(patterns):
        _link(start, _parse(pattern)).rule = index
    return _State(frozenset([start]))


_SYNTAX = re.compile(r"\\.|\[(?:\\.|[^]\\])+\]|\{\d+,\d+\}|.", re.DOTALL)
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def _parse(pattern: str) -> list[list[Any]]:
    """Alternatives of a pattern. Each is a sequence of character tests, (part, least, most) tuples and alternatives."""
    while (named := re.sub(r"\{([a-z']+)\}", lambda name: f"({_PARTS[name[1]]})", pattern)) != pattern:
        pattern = named
    return _alternatives(_SYNTAX.findall(pattern)[::-1])


def _alternatives(symbols: list[str]) -> list[list[Any]]:
    """Consume symbols, in reverse order, up to the bracket that closes the group."""
    alternatives: list[list[Any]] = [[]]
    while symbols and (symbol := symbols.pop()) != ")":
        if symbol == "|":
            alternatives.append([])
        elif symbol == "(":
            alternatives[-1].append(_alternatives(symbols))
        elif symbol in _REPEATS:
            alternatives[-1].append((alternatives[-1].pop(), *_REPEATS[symbol]))
        elif symbol[0] == "{":
            alternatives[-1].append((alternatives[-1].pop(), *map(int, symbol[1:-1].split(","))))
        else:
            alternatives[-1].append(_test(symbol))
    return alternatives


@cache
def _test(symbol: str) -> Callable[[str], object]:
    if symbol in (r"\l", r"\d"):
        return _is_letter if symbol == r"\l" else _is_digit
    return re.compile(symbol, 0 if symbol[0] == "[" else re.IGNORECASE).match


def _link(start: _Place, part: Any) -> _Place:
    """Append a part of a pattern to a place. Returns the place after the part."""
    end = _Place()
    if callable(part):
        start.steps.append((part, end))
    elif isinstance(part, list):
        for sequence in part:
            place = start
            for item in sequence:
                place = _link(place, item)
            place.free.append(end)
    else:
        part, least, most = part
        for _ in range(least):
            start = _link(start, part)
        if most is None:
            start.free.append(end)
            _link(end, part).free.append(end)
        else:
            for _ in range(most - least):
                start.free.append(end)
                start = _link(start, part)
            start.free.append(end)
    return end
