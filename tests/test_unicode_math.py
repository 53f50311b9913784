"""LaTeX as one line of Unicode: what is written, and that nothing changes its meaning."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_variants.unicode_math import to_unicode

CASES = {
    # indices: single letters and numbers become small, words do not
    r"\hat A_{i,t}": "Âᵢₜ",
    r"\delta_{i,t+1}": "δᵢₜ₊₁",
    r"V_{\text{old}}": "V_old",
    r"\pi_\theta": "π_θ",
    r"r_G": "r_G",
    r"x_{\max}": "x_max",
    r"\sum_{i \in m} \sum_{j \neq i}": "Σ_{i∈m} Σ_{j≠i}",
    r"\mathrm{std}_{0}(r)": "std₀(r)",
    # powers
    r"(x - y)^2": "(x - y)²",
    r"10^{-6}": "10⁻⁶",
    r"3 \times 10^{-4}": "3×10⁻⁴",
    r"\gamma^{s-t}": "γˢ⁻ᵗ",
    r"x^{1/|o_i|}": "x^(1/|oᵢ|)",
    # fractions keep their meaning
    r"\frac{1}{N}": "1/N",
    r"\frac{1}{G-1}": "1/(G-1)",
    r"\frac{1}{N L}": "1/(N L)",
    r"\frac{a - b}{c}": "(a - b)/c",
    r"\frac{a}{b / c}": "a/(b / c)",
    r"\frac{1}{|o_i - 1|}": "1/|oᵢ - 1|",
    r"\frac{-a}{b}": "-a/b",
    r"\log\frac{a}{b}": "log(a/b)",
    r"\log \frac{a}{b}": "log (a/b)",
    r"\beta \frac{n}{h}": "β n/h",
    r"\tfrac{1}{2} x": "½ x",
    # names of functions, letters, signs and spaces
    r"\log\pi": "log π",
    r"\min\left( a,\; b \right)": "min(a, b)",
    r"\mathrm{clip}\!\left(x, -1, 0\right)": "clip(x, -1, 0)",
    r"\mathcal{L} = \mathbb{E}[r]": "ℒ = 𝔼[r]",
    r"\varepsilon \lambda \Delta \Lambda": "ε λ Δ Λ",
    r"a \,/\, b": "a / b",
    r"\text{keep groups with } x < 1": "keep groups with x < 1",
    r"\text{seq\_mean}": "seq_mean",
    r"\left. x \right|": "x |",
    r"\bar x, \tilde{y}": "x̄, ỹ",
    # what is not known stays as a word, and unfinished input is no error
    r"\foo{x} + \mathcal{Q}": "foo x + Q",
    r"\frac{1}": "1/",
    r"x_": "x",
    r"a } b": "a b",
}


@pytest.mark.parametrize(("latex", "text"), CASES.items(), ids=CASES)
def test_latex_is_written_in_unicode(latex: str, text: str) -> None:
    assert to_unicode(latex) == text


@given(st.text(alphabet="abcABC0123456789+-=.,()|/<>"))
def test_text_without_commands_stays_as_it_is(text: str) -> None:
    assert to_unicode(text) == text


@given(st.text(alphabet="abijtL12{}^_ +-/|(),"))
def test_no_letter_or_digit_is_lost_or_moved(text: str) -> None:
    written = unicodedata.normalize("NFKC", to_unicode(text))  # small letters and digits as plain ones
    assert [c for c in written if c.isalnum()] == [c for c in text if c.isalnum()]


@given(
    st.lists(st.sampled_from([r"\frac", r"\hat", r"\left", r"\text", "\\", "{", "}", "^", "_", " ", "x", "."])).map(
        "".join
    )
)
def test_no_input_is_an_error_and_one_line_comes_out(text: str) -> None:
    assert "\n" not in to_unicode(text)
