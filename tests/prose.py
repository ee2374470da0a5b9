"""Patterns of prose that the project does not use, with the rule that each one breaks."""

import io
import re
import tokenize

# Over everything that is read as prose: comments, docstrings and messages, and the text of pages.
ANYWHERE = {
    r"(?i)(?<!there )\b(?:is|are|was|were|be) no (?!(?:longer|more|less|fewer|larger|smaller)\b)[\w-]+": "is not a",
    r"(?i)\b(?:told|tells|tell|telling)\b": "write passed, reported, listed or described",
    r"(?i)\b(?:stands?|stood|standing)\b": "write is, lies, precedes or follows",
    r"(?i)\b(?:nobody|somebody|whoever|whosoever)\b": "name the actor: the caller, another holder, the kernel",
    r"(?i)\b(?:so many|as many|as far as|as much as)\b": "write the number: n, up to n",
    r"(?i)\bbeside\b": "write alongside, next to or in addition to",
    r"(?i)\bbehind\b": "write after",
    r"(?i)\b(?:be|is|are|was|were|been) had\b": "write available or obtained",
    r"(?i)\bbe it\b": "say it in a clause of its own",
    r"(?:^|[.:] +)(?:Of which|Of those|As many|The same (?:for|of|as|with|where|to|in)\b)": "repeat the noun",
    r"\b(?:Errand|soften|weigh|Standing|Wish|IntegerOnItsWay|divide_up|has_worth|brought_to|brought_result)\b": (
        "use the term of the field"
    ),
}
OPENING = re.compile(r"(?:What|Which|Where|Wherever|How|Who|Whose|Whether|Whatever)\b")
# May find openings elsewhere, too, but misses none.
SUSPECTED_OPENING = re.compile(rf'["#/][r/#"<! ]*{OPENING.pattern}')
OPENING_RULE = "open with a noun phrase or an imperative"
# Docstrings and comments; other strings may be headings or data.
HEADERS = ('"""', 'r"""', "#", "//")


def faults(path):
    """Return ``(line, text, rule)`` for each fault in the prose of a file."""
    text = path.read_text()
    if not (SUSPECTED_OPENING.search(text) or any(re.search(pattern, text, re.MULTILINE) for pattern in ANYWHERE)):
        return []
    if path.suffix == ".md":
        passages = [(1, re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL))]
        openings = []
    elif path.suffix in {".py", ".pyi"}:
        passages = _python_passages(text)
        openings = passages
    else:
        passages = openings = _native_passages(text)
    found = []
    # Patterns match within a line: most files are done after one search of all passages.
    everything = "\n".join(passage for _, passage in passages)
    suspected = {pattern: rule for pattern, rule in ANYWHERE.items() if re.search(pattern, everything, re.MULTILINE)}
    for line, passage in passages if suspected else ():
        for pattern, rule in suspected.items():
            matches = re.finditer(pattern, passage, re.MULTILINE)
            found += [(line + passage.count("\n", 0, match.start()), match[0], rule) for match in matches]
    headers = [(line, text.lstrip()) for line, text in openings if text.lstrip().startswith(HEADERS)]
    found += [(line, text[:40], OPENING_RULE) for line, text in headers if OPENING.match(text.lstrip('r/#"<! '))]
    return sorted(found)


def _python_passages(text):
    """Comments, a block of adjoining lines as one passage, and strings."""
    passages = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            if alone and passages and last == token.start[0] - 1:
                passages[-1] = (passages[-1][0], passages[-1][1] + "\n" + token.string)
            else:
                passages.append((token.start[0], token.string))
            last = token.start[0] if alone else -1
        elif token.type == tokenize.STRING or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            passages.append((token.start[0], token.string))
    return passages


DIRECTIVE = r"\s*(?:include|define|if|else|elif|end|pragma|undef|error)"
COMMENT = re.compile(
    r'"""(?:.|\n)*?"""'  # a docstring
    rf"|(?:(?<=\n)[ \t]*(?://|#(?!{DIRECTIVE}))[^\n]*\n)+"  # a block of adjoining comment lines
    r"|(?://|# )[^\n]*"  # a comment after code
    r'|"(?:[^"\\\n]|\\.)*"'  # a string
)


def _native_passages(text):
    """Comments, docstrings and strings of C++, CUDA and Cython."""
    return [(text.count("\n", 0, m.start()) + 1, m[0]) for m in COMMENT.finditer("\n" + text)]
