"""Oracle of a prefix cache with states and unlimited room: sets of block prefixes and of prefixes with a state."""

from tests.reference.state_table import checkpoint_length


def count_state_hits(texts, block_size, chunk, interval, step_tokens):
    """Return (tokens in cached blocks, tokens before the deepest state) of each of sequential requests.

    `texts` are pairs of a prompt and the text that is computed in the end, which begins with the prompt. A request runs
    alone: its prompt in steps of at most `step_tokens` tokens, and then one token a step.
    """
    blocks, states, found = set(), set(), []
    for prompt, computed in texts:
        names = prefix_names(computed, block_size)
        matched = 0
        while matched < (len(prompt) - 1) // block_size and names[matched] in blocks:
            matched += 1
        hit = next((n for n in range(matched, 0, -1) if names[n - 1] in states), 0) * block_size
        matched *= block_size
        found.append((matched, hit))
        length = hit
        while length < len(computed):
            count = min(step_tokens, len(prompt) - length) if length < len(prompt) else 1
            kept = checkpoint_length(length, count, chunk, interval, block_size, 0, matched)
            if kept:
                states.add(names[kept // block_size - 1])
            length += count
        blocks.update(names)
    return found


def prefix_names(text, block_size):
    """Return a name for each prefix of whole blocks, equal for equal prefixes."""
    names, name = [], None
    for start in range(0, len(text) - block_size + 1, block_size):
        name = hash((name, tuple(text[start : start + block_size])))
        names.append(name)
    return names
