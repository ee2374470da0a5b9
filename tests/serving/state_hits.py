"""Oracle of a prefix cache with states and unlimited room: sets of block prefixes and of prefixes with a state."""

import math

from tests.reference.state_table import checkpoint_length


def count_state_hits(texts, block_size, chunk, interval, step_tokens):
    """Return (tokens in cached blocks, tokens before the deepest state) of each of sequential requests.

    `texts` are pairs of a prompt and the text that is computed in the end, which begins with the prompt. A request runs
    alone: its prompt in steps of at most `step_tokens` tokens, which end as `prompt_end` says, and then one token a
    step.
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
        length = start = hit
        grid = math.lcm(block_size, chunk)
        while length < len(computed):
            count = 1
            if length < len(prompt):
                count = prompt_end(len(prompt), start, length, matched, grid, step_tokens) - length
            end = (len(prompt) - 1) // block_size * block_size if length < len(prompt) else length
            kept = checkpoint_length(length, count, chunk, interval, block_size, 0, matched, end=end)
            if kept:
                states.add(names[kept // block_size - 1])
            length += count
        blocks.update(names)
    return found


def prompt_end(total, start, length, matched, grid, most):
    """Return the end of a step of a prompt of `total` tokens that has computed `length`, `start` of them reused.

    It is the first of: the last point of the grid in the shared blocks, those 512, 2048, 8192 and 32768 tokens before
    the end if they are 512 tokens after the reused ones, and the last that `most` tokens reach; else what they reach.
    From a point of the grid on, one step computes all that is left.
    """
    wanted = [matched] + [total - 512 * 4**k for k in range(4) if (total - 512 * 4**k) // grid * grid >= start + 512]
    points = [point // grid * grid for point in [*wanted, length + most]]
    if total <= length + most:
        points[-1] = 0 if length % grid == 0 else (total - 1) // grid * grid
    return min((point for point in points if length < point < total), default=min(total, length + most))


def prefix_names(text, block_size):
    """Return a name for each prefix of whole blocks, equal for equal prefixes."""
    names, name = [], None
    for start in range(0, len(text) - block_size + 1, block_size):
        name = hash((name, tuple(text[start : start + block_size])))
        names.append(name)
    return names
