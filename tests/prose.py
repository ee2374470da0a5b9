"""Patterns of prose that the project does not use, with the rule that each one breaks."""

import io
import re
import tokenize


def phrases(advice, *words, before=r"(?i)\b", after=r"\b"):
    """Return a rule against words: the words in lower case, a pattern that finds them, and what to write instead."""
    pattern = re.compile(rf"{before}(?:{'|'.join(words)}){after}", re.MULTILINE)
    return [word.lower() for word in words], pattern, advice


def after_each(verbs, words):
    return [f"{verb} {word}" for verb in verbs for word in words]


# Over everything that is read as prose: comments, docstrings and messages, and the text of pages.
ANYWHERE = [
    phrases(
        "is not a",
        *after_each(("is", "are", "was", "were", "be"), ["no "]),
        before=r"(?i)(?<!there )\b",
        after=r"(?!(?:longer|more|less|fewer|larger|smaller)\b)[\w-]+",
    ),
    phrases("write passed, reported, listed or described", "told", "tells", "tell", "telling"),
    phrases("write is, lies, precedes or follows", "stands", "stand", "stood", "standing"),
    phrases("name the actor: the caller, another holder, the kernel", "nobody", "somebody", "whoever", "whosoever"),
    phrases("write the number: n, up to n", "so many", "as many", "as far as", "as much as"),
    phrases("write alongside, next to or in addition to", "beside"),
    phrases("write after", "behind"),
    phrases("write available or obtained", *after_each(("be", "is", "are", "was", "were", "been"), ["had"])),
    phrases("say it in a clause of its own", "be it"),
    phrases(
        "repeat the noun",
        *("Of which", "Of those", "As many"),
        *after_each(["The same"], ("for", "of", "as", "with", "where", "to", "in")),
        before=r"(?:^|[.:] +)",
    ),
    phrases(
        "use the term of the field",
        *("Errand", "soften", "weigh", "Standing", "Wish", "IntegerOnItsWay", "divide_up", "has_worth"),
        *("brought_to", "brought_result"),
        before=r"\b",
    ),
]
OPENING = re.compile(r"(?:What|Which|Where|Wherever|How|Who|Whose|Whether|Whatever)\b")
# May find openings elsewhere, too, but misses none.
SUSPECTED_OPENING = re.compile(rf'["#/][r/#"<! ]*{OPENING.pattern}')
OPENING_RULE = "open with a noun phrase or an imperative"
# Docstrings and comments; other strings may be headings or data.
HEADERS = ('"""', 'r"""', "#", "//")


def faults(path):
    """Return ``(line, text, rule)`` for each fault in the prose of a file."""
    text = path.read_text()
    lower = text.lower()  # words are searched for before patterns, which takes a tenth of the time
    suspected = [rule for rule in ANYWHERE if any(word in lower for word in rule[0]) and rule[1].search(text)]
    if not (suspected or SUSPECTED_OPENING.search(text)):
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
    for line, passage in passages if suspected else ():
        for _, pattern, advice in suspected:
            matches = pattern.finditer(passage)
            found += [(line + passage.count("\n", 0, match.start()), match[0], advice) for match in matches]
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
