r"""Normalises LaTeX and plain text, so that spellings such as `\dfrac12`, `1/2` and `½` can be compared."""

import re
import unicodedata
from fractions import Fraction

_CHARACTERS = {
    **{char: f"^{{{digit}}}" for char, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹", range(10), strict=True)},
    **dict.fromkeys("−–—‑", "-"),
    **dict.fromkeys("·⋅∙×✕", r" \times "),
    **dict.fromkeys("£€¥₹", ""),
    **dict.fromkeys('“”„"`', ""),
    **{"÷": "/", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
    **dict.fromkeys("ℝ", r"\mathbb{R}"),
    **{"∪": r"\cup ", "∈": r"\in ", "≈": r"\approx ", "∅": r"\emptyset ", "º": "°", "’": "'"},
}
_NAMES = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge", "neq": "ne"}
_NAMES |= {"leqslant": "le", "geqslant": "ge", "lt": "<", "gt": ">", "varnothing": "emptyset", "cdot": "times", "ast": "times"}
_NAMES |= {"degree": "°", "vert": "|", "lvert": "|", "rvert": "|", "mid": "|", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]"}
_NAMES |= {"langle": "(", "rangle": ")", "infin": "infty", "div": "/", "colon": ":", "quad": " ", "qquad": " ", "lor": "or", "vee": "or"}
_NAMES |= {"dots": "ldots", "cdots": "ldots", "dotsc": "ldots"}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {"a": 1} | {word: n for n, word in enumerate(_ONES.split())} | {word: 20 + 10 * n for n, word in enumerate(_TENS.split())}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_SCALE, _PART = "|".join(_SCALES), "|".join(_PARTS)
_SMALL = rf"(?:(?:{_TENS.replace(' ', '|')})(?:[- ](?:{_ONES.replace(' ', '|')}))?|{'|'.join(reversed(_ONES.split()))})"
NUMBER_WORD = rf"(?:{_SMALL}|{_SCALE})"
_SPELLED = re.compile(
    rf"(?i:((?:{_SMALL}|a(?=[- ](?:{_SCALE}|{_PART})))(?: (?:{_SCALE})(?: (?:and )?{_SMALL})?)*)(?:[- ]({_PART})s?)?)(?=$| [a-z]| ?[°%])"
)
_SCALED = re.compile(rf"(\d[\d.]*) (?i:({_SCALE})s?)\b")
_CHOOSE = (
    re.compile(r"(?<![\w})])[_^] ?\{?(\d+|n)\}? ?([CP]) ?_? ?\{?(\d+|[kr])\}?(?!\w)"),
    re.compile(r"(?<![\w.}_^])(\d+)([CP])(\d+)(?!\w)"),
    re.compile(r"(?<![\w\\])(?:(?=C ?\( ?(\d+|n) ?, ?)(?=(C)).*?, ?(\d+|[kr]) ?\))"),
    re.compile(r"(?<![\w\\])(?=C ?_ ?\{?(\d\d+|[3-9]|n)\}? ?\^)(?=(C))[^^]*\^ ?\{?(\d+|[kr])\}?(?!\w)"),
)
_REALS = re.compile(r"\\(?:mathbb|Bbb) ?(?:\{ ?R ?\}|R\b)|\\(?:reals|R)\b|\b(?:the set of )?(?:all )?real numbers\b|\ball reals\b")
_SIZES = {
    "am": "am 1",
    "pm": "pm 1",
    "m": "mm 0.001 cm 0.01 m 1 km 1000 meter 1 inch 0.0254 inche 0.0254 in 0.0254 ft 0.3048 feet 0.3048 foot 0.3048 mile 1609.344",
    "kg": "mg 0.000001 g 0.001 gram 0.001 kg 1 kilogram 1 pound 0.45359237 lb 0.45359237",
    "s": "second 1 sec 1 s 1 minute 60 min 60 hour 3600 hr 3600 h 3600 day 86400 week 604800",
    "$": "dollar 1 cent 0.01",
    **{letter: f"{letter} 1" for letter in ("A", "C", "F", "H", "J", "K", "L", "N", "T", "V", "W", "C°", "F°")},
}
UNITS = {
    name: (base, Fraction(size)) for base, text in _SIZES.items() for name, size in zip(text.split()[::2], text.split()[1::2], strict=True)
}
"""Unit -> base unit, and size in the base unit."""
ROW_END = "\N{RETURN SYMBOL}"
_DROPPED = r"left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|mathopen|mathclose|rm|bf|it|scriptstyle"
_TEXT = re.compile(r"\\(?:text\w*|math[a-z]+|boldsymbol|mbox|hbox|operatorname\*?|boxed|fbox|overrightarrow|vec)\s*\{([^{}]*)\}")
_FONT = re.compile(r"\\(?:math(?:bb|bf|cal|it|rm|sf)|boldsymbol) ?(?=[A-Za-z]\b)")
_COMPOUND = re.compile(r"(\d[\d.]*) ([a-z]+\.?),? (?:and )?(\d[\d.]*) ([a-z]+)\b")
_SUPERSCRIPT = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?")
_PLAIN = {"infinity": r"\infty", "degrees": "°", "degree": "°", "sqrt": r"\sqrt"}


def normalised(text: str, *, thousands: bool = True) -> str:
    r"""Return a text without delimiters, fonts, spacing and thousands separators, and with synonyms replaced.

    Example:
        normalised(r"\$1{,}000.50\text{ dollars}")  # -> "1000.50 dollars"
    """
    text = "".join(_CHARACTERS.get(char, char) for char in text)
    text = re.sub(r"\b([apAP])\.\s?([mM])\b", r"\1\2", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda match: r" \frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("⁄")), text)
    text = _REALS.sub(lambda _: r"(-\infty,\infty)", unicodedata.normalize("NFKC", text))
    text = text.replace(r"\\", ROW_END) if r"\begin" in text else text.replace(r"\\", "\\")
    text = re.sub(r"\\[()]|\\\[|(?<!\\)\\\](?!\[)|\\?\$|\\!|\{\s*\}", "", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,; ]|[_'])(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<![\d.,])(?<!\d )\d{1,3}(?: \d{3})+(?![\d/]| \d)", lambda match: match[0].replace(" ", ""), text)
    if thousands:
        text = re.sub(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda match: match[0].replace(",", ""), text)
    text = re.sub(rf"\\(?:{_DROPPED})(?![a-zA-Z])\.?|\\[,;:> ]|~", " ", text).replace("\\%", "%").replace("\\#", "#").replace("{:}", ":")
    text = _SUPERSCRIPT.sub("°", text)
    for _ in range(3):
        text = _TEXT.sub(r" \1 ", text)
    text = re.sub(r"\\([a-zA-Z]+)", _named, _FONT.sub("", text))
    text = re.sub(r"(?<!\\)\b(?:infinity|per ?cent(?:age(?! point))?|pct|degrees?|sqrt)\b", lambda match: _PLAIN.get(match[0], "%"), text)
    text = re.sub(r"° *([CF]\b|[Cc]elsius|[Ff]ahrenheit)", lambda match: f" {match[1][0]}°", text)
    for pattern in _CHOOSE:
        text = pattern.sub(_binomial, text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(?<![\d.}^_)a-zA-Z])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{?(\d+)\}?", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"^(?: ?\\approx)? ", "", re.sub(r"\s+", " ", text).rstrip(" .,;:").lstrip(" ,;:="))
    text = re.sub(r"\b(?:USD|EUR|GBP|INR|Rs\.?) ?(?=\d)", "", re.sub(r"\band (?:a|one) half\b", "and 1/2", text))
    text = _SPELLED.sub(_spelled, text, count=1) if _SPELLED.match(text) else text
    text = _SCALED.sub(lambda match: str(Fraction(match[1].rstrip(".")) * _SCALES[match[2].lower()]), text)
    text = re.sub(r"(?<![\d.}^_)/])(\d+)\s+(?:and\s+)?(\d+)/(\d+)(?!\d)", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)", r"\\times ", text).replace("**", "^")
    text = _COMPOUND.sub(_added, text)
    return re.sub(r"\s+", " ", text).rstrip(" .,;:").lstrip(" ,;:=")


def is_unit(word: str) -> bool:
    """True for a name in `UNITS`, singular or plural."""
    return word in UNITS or word.lower().removesuffix("s") in UNITS


def compact(text: str) -> str:
    """Return a normalised text without spaces, and without braces around single characters."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\d) | (?!\d)", "", text).replace(r"\times", "*"))


def _named(match: re.Match[str]) -> str:
    name = _NAMES.get(match[1], match[1])
    return f"\\{name} " if (name.isalpha() and name != "or") or name in "{}" else f" {name} "


def _spelled(match: re.Match[str]) -> str:
    """Convert a number in words, such as `two thousand and five` or `two thirds`, to digits."""
    total = part = 0
    for word in re.findall("[a-z]+", match[1].lower().replace(" and ", " ")):
        part = (part or 1) * _SCALES[word] if word in _SCALES else part + _WORDS[word]
        if _SCALES.get(word, 0) >= 1000:
            total, part = total + part, 0
    return f"{total + part}" + (f"/{_PARTS[match[2].lower()]}" if match[2] else "")


def _added(match: re.Match[str]) -> str:
    """Add two amounts of one kind, the larger unit first, in the larger unit: `2 hours and 30 minutes` becomes `5/2 hours`."""
    (first, size), (second, small) = (
        UNITS.get(unit) or UNITS.get(unit.removesuffix("s"), (unit, Fraction(0))) for unit in match.group(2, 4)
    )
    if first != second or size <= small or not all(re.fullmatch(r"\d+(\.\d+)?", number) for number in match.group(1, 3)):
        return match[0]
    return f"{Fraction(match[1]) + Fraction(match[3]) * small / size} {match[2]}"


def _binomial(match: re.Match[str]) -> str:
    many, kind, few = match.groups()
    return rf"\binom{{{many}}}{{{few}}}" if kind == "C" else rf"\frac{{{many}!}}{{({many}-{few})!}}"
