"""What a prefix cache that forgets nothing finds, by a plain dictionary of block prefixes."""


def count_hits(texts, block_size):
    """Blocks that prompts could reuse and those that they do, served one after the other.

    `texts` are pairs of a prompt and all that is computed of it in the end, the prompt first. What could be reused is
    whole blocks below the last token of the prompt.
    """
    known, query, hits = set(), 0, 0
    for prompt, computed in texts:
        # A prefix is named by its last block and the name of what is before it, which are as many names as blocks.
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
