"""A hook of mkdocs: LaTeX becomes MathML, which browsers show without JavaScript or another host."""

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex (generic) makes of \( ... \) and $$ ... $$, and the punctuation beside it.
EQUATION = re.compile(
    r"(?P<before>\(?)"
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>'
    r"(?P<after>[-.,;:)?!'\u2019]*)",
    re.DOTALL,
)
# As in TeX, bars only grow after \left, \right and the like, whose <mo> has attributes.
BARS = re.compile(r"<mo>(?P<bar>\||&#x0007C;|&#x02016;|&#x02225;)</mo>")


def on_page_content(content, page, config, files):
    """Replaces every equation of a page."""
    return EQUATION.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    tag = match["tag"]
    display = "block" if tag == "div" else "inline"
    latex = html.unescape(match["latex"]).strip()
    equation = convert(latex, display=display)
    if "\\" in equation:
        raise ValueError(f"latex2mathml does not know a command of this equation:\n{latex}")
    equation = BARS.sub(r'<mo stretchy="false">\g<bar></mo>', equation)
    if tag == "div":
        return f'{match["before"]}<div class="arithmatex">{equation}</div>{match["after"]}'
    # Punctuation stays in the line of its equation.
    return f'<span class="arithmatex">{match["before"]}{equation}{match["after"]}</span>'
