r"""Writes LaTeX and plain text in one way, so that `\dfrac12`, `1/2` and `½` differ only where they differ in meaning."""

import re
import unicodedata

_CHARACTERS = {
    **{char: f"^{{{digit}}}" for char, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹", range(10), strict=True)},
    **dict.fromkeys("−–—‑", "-"),
    **dict.fromkeys("·⋅∙×✕", r" \times "),
    **dict.fromkeys("£€¥₹", ""),
    **dict.fromkeys('“”„"`', ""),
    **{"½": r" \frac{1}{2}", "⅓": r" \frac{1}{3}", "⅔": r" \frac{2}{3}", "¼": r" \frac{1}{4}", "¾": r" \frac{3}{4}"},
    **{"÷": "/", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
    **{"∪": r"\cup ", "∈": r"\in ", "≈": r"\approx ", "∅": r"\emptyset ", "º": "°", "’": "'"},
}
_NAMES = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge", "neq": "ne"}
_NAMES |= {"leqslant": "le", "geqslant": "ge", "lt": "<", "gt": ">", "varnothing": "emptyset", "cdot": "times", "ast": "times"}
_NAMES |= {"degree": "°", "vert": "|", "lvert": "|", "rvert": "|", "mid": "|", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]"}
_NAMES |= {"langle": "(", "rangle": ")", "infin": "infty", "div": "/", "colon": ":", "quad": " ", "qquad": " ", "lor": "or", "vee": "or"}
ROW_END = "\N{RETURN SYMBOL}"
_DROPPED = r"left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|mathopen|mathclose|rm|bf|it|scriptstyle"
_TEXT = re.compile(r"\\(?:text\w*|math[a-z]+|boldsymbol|mbox|hbox|operatorname\*?|overrightarrow|vec)\s*\{([^{}]*)\}")
_SUPERSCRIPT = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?")
_SPELLED = {"infinity": r"\infty", "percent": "%", "degrees": "°", "degree": "°", "sqrt": r"\sqrt"}


def normalised(text: str, *, thousands: bool = True) -> str:
    r"""The text without delimiters, fonts, spacing and thousands separators, its synonyms replaced.

    Example:
        normalised(r"\$1{,}000.50\text{ dollars}")  # -> "1000.50 dollars"
    """
    text = "".join(_CHARACTERS.get(char, char) for char in text)
    text = re.sub(r"\b([apAP])\.\s?([mM])\b", r"\1\2", text)
    text = unicodedata.normalize("NFKC", text)
    text = text.replace(r"\\", ROW_END) if r"\begin" in text else text.replace(r"\\", "\\")
    text = re.sub(r"\\[()]|\\\[|(?<!\\)\\\](?!\[)|\\?\$|\\!|\{\s*\}", "", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|\\ |\\;)(?=\d{3}(?!\d))", "", text)
    if thousands:
        text = re.sub(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda match: match[0].replace(",", ""), text)
    text = re.sub(rf"\\(?:{_DROPPED})(?![a-zA-Z])\.?|\\[,;:> ]|~", " ", text).replace("\\%", "%").replace("\\#", "#")
    text = _SUPERSCRIPT.sub("°", text)
    for _ in range(3):
        text = _TEXT.sub(r" \1 ", text)
    text = re.sub(r"\\([a-zA-Z]+)", _named, text)
    text = re.sub(r"(?<!\\)\b(?:infinity|percent|degrees?|sqrt)\b", lambda match: _SPELLED[match[0]], text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(?<![\d.}^_)a-zA-Z])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{?(\d+)\}?", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\d.}^_)/])(\d+)\s+(?:and\s+)?(\d+)/(\d+)(?!\d)", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)", r"\\times ", text).replace("**", "^")
    return re.sub(r"\s+", " ", text).rstrip(" .,;:").lstrip(" ,;:=")


def compact(text: str) -> str:
    """The normalised text without spaces and braces that only group one character."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\d) | (?!\d)", "", text).replace(r"\times", "*"))


def _named(match: re.Match[str]) -> str:
    name = _NAMES.get(match[1], match[1])
    return f"\\{name} " if (name.isalpha() and name != "or") or name in "{}" else f" {name} "
