"""Oracle of an unbounded prefix cache: a plain dictionary of block prefixes."""


def count_hits(texts, block_size):
    """Return the number of blocks that sequential prompts could reuse, and the number that they do reuse.

    `texts` are pairs of a prompt and the text that is computed in the end, which begins with the prompt. A prompt can
    reuse the full blocks before its last token.
    """
    known, query, hits = set(), 0, 0
    for prompt, computed in texts:
        # The name of a prefix is the hash of its last block and of the name of the prefix before that block.
        names, name = [], None
        for start in range(0, len(computed) - block_size + 1, block_size):
            name = (name, tuple(computed[start : start + block_size])).__hash__()
            names.append(name)
        possible = (len(prompt) - 1) // block_size
        query += possible
        for name in names[:possible]:
            if name not in known:
                break
            hits += 1
        known.update(names)
    return query, hits
