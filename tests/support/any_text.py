"""Arbitrary text: lone and paired surrogates, NUL, combining and wide characters."""

from hypothesis import strategies as st

ANY_TEXT = st.text(st.characters(exclude_categories=()) | st.sampled_from("\ud83d\ude00\ud800\udfff\0é世e\u0301"), max_size=20)
