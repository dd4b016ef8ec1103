"""sacremoses' punctuation normaliser and tokenizer, some six times faster, with equal results.

What costs time in sacremoses is rules that cannot match: some fifty regular expressions are run
over each line, and the sets of alphabetic and lower-case characters are built anew for each full
stop. Here a rule is skipped when the line lacks a string that every match of it holds, and the
sets are built once. All rules are sacremoses' own; one that this file does not know is always run.
tests/test_moses.py compares the results with those of sacremoses itself.
"""

import re

from sacremoses import MosesPunctNormalizer, MosesTokenizer

# A pattern of MosesPunctNormalizer in ASCII → a string that each of its matches holds. " +" → " "
# changes nothing unless there are two spaces.
NEEDED = {
    r" +": "  ",
    r"\r": "\r",
    r"\(": "(",
    r"\)": ")",
    r"\) ([.!:?;,])": ") ",
    r"\( ": "( ",
    r" \)": " )",
    r"(\d) %": " %",
    r" :": " :",
    r" ;": " ;",
    r"`": "`",
    r"''": "''",
    r'"([,.]+)': '"',
    r',"': ',"',
    r'(\.+)"(\s*[^<])': '."',
}
# A rule of MosesTokenizer → a string that each of its matches holds.
NEEDED_BY_TOKENIZER = {
    "COMMA_SEPARATE_1": ",",
    "COMMA_SEPARATE_2": ",",
    "COMMA_SEPARATE_3": ",",
    "NON_SPECIFIC_APOSTROPHE": "'",
    "TRAILING_DOT_APOSTROPHE": ".'",
    "AGGRESSIVE_HYPHEN_SPLIT": "-",
}
DIGIT_FIRST = re.compile("^[0-9]+")


def needed_string(pattern: str) -> str:
    """A string that each match of a normaliser's pattern holds; "" if none is known.

    The patterns with characters outside ASCII have none of them in a class, an alternative or
    before a quantifier, so that each match holds the first of them.
    """
    outside = (character for character in pattern if not character.isascii())
    return NEEDED.get(pattern, next(outside, ""))


class FastNormalizer(MosesPunctNormalizer):
    """``MosesPunctNormalizer`` whose ``normalize`` skips the rules that cannot match."""

    def __init__(self, lang: str, norm_numbers: bool) -> None:
        super().__init__(lang, norm_numbers=norm_numbers)
        rules = [(pattern, text) for pattern, text in self.substitutions]
        self._rules = [(needed_string(p), re.compile(p).sub, text) for p, text in rules]
        # No rule puts a character outside ASCII into text that had none.
        self._ascii_rules = [
            rule for rule, (p, _) in zip(self._rules, rules, strict=True) if p.isascii()
        ]

    def normalize(self, text: str) -> str:
        for needed, substitute, replacement in self._ascii_rules if text.isascii() else self._rules:
            if needed in text:
                text = substitute(replacement, text)
        return text.strip()


class _Guarded:
    """A compiled pattern that looks for ``needed`` first; sacremoses calls its ``sub`` only."""

    def __init__(self, pattern: "re.Pattern[str]", needed: str) -> None:
        self._substitute = pattern.sub
        self._needed = needed

    def sub(self, replacement: str, text: str) -> str:
        return self._substitute(replacement, text) if self._needed in text else text


class _SingleSpaces:
    r"""In the place of ``\s+`` → one space: both agree on what a space is. The spaces at the ends
    go too; sacremoses strips them wherever it uses this rule."""

    def sub(self, _: str, text: str) -> str:
        return " ".join(text.split())


class FastTokenizer(MosesTokenizer):
    """``MosesTokenizer`` whose ``tokenize`` skips the rules that cannot match."""

    def __init__(self, lang: str) -> None:
        super().__init__(lang)
        for name, needed in NEEDED_BY_TOKENIZER.items():
            pattern, replacement = getattr(self, name)
            # Some versions of sacremoses keep a rule as a string.
            setattr(self, name, (_Guarded(re.compile(pattern), needed), replacement))
        for name in ("ENGLISH_SPECIFIC_APOSTROPHE", "FR_IT_SPECIFIC_APOSTROPHE"):
            rules = [(_Guarded(pattern, "'"), text) for pattern, text in getattr(self, name)]
            setattr(self, name, rules)
        self.DEDUPLICATE_SPACE = (_SingleSpaces(), " ")
        self._lower, self._alpha = frozenset(self.IsLower), frozenset(self.IsAlpha)
        self._numeric = frozenset(self.NUMERIC_ONLY_PREFIXES)
        self._nonbreaking = frozenset(self.NONBREAKING_PREFIXES) - self._numeric

    def islower(self, text: str) -> bool:
        return self._lower.issuperset(text)

    def isanyalpha(self, text: str) -> bool:
        return not self._alpha.isdisjoint(text)

    def handles_nonbreaking_prefixes(self, text: str) -> str:
        """Set a full stop apart, unless it ends an abbreviation or the sentence goes on."""
        tokens = text.split()
        if "." not in text:
            return " ".join(tokens)
        for i, token in enumerate(tokens):
            if token[-1] != "." or len(token) == 1:
                continue
            prefix = token[:-1]
            following = tokens[i + 1] if i + 1 < len(tokens) else ""
            if not (
                ("." in prefix and self.isanyalpha(prefix))
                or prefix in self._nonbreaking
                or (following and self.islower(following[0]))
                or (prefix in self._numeric and DIGIT_FIRST.search(following))
            ):
                tokens[i] = prefix + " ."
        return " ".join(tokens)
