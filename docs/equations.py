"""A hook of mkdocs: LaTeX becomes MathML, which browsers show without JavaScript or another host."""

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex (generic) makes of \( ... \) and $$ ... $$.
EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(content, page, config, files):
    """Replaces every equation of a page."""
    return EQUATION.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    tag = match["tag"]
    display = "block" if tag == "div" else "inline"
    equation = convert(html.unescape(match["latex"]).strip(), display=display)
    return f'<{tag} class="arithmatex">{equation}</{tag}>'
