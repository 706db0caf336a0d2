"""Removes what is reStructuredText in docstrings, which mkdocstrings shows as it is: roles, marks of literal blocks."""

import re


def on_page_content(html: str, **_: object) -> str:
    return re.sub(r':(?:func|class|data|meth):(?=<code>)|<p>::</p>', '', html)
