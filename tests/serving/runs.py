"""Requests, and a fake model whose tokens are known in advance."""

import numpy as np

from pagecore.serving.scheduling.request import Request


def next_token(text, sample):
    """Return the next token of the fake model; it depends on every earlier token, so lost or repeated ones show."""
    return after(sample + 1, text)


def after(value, tokens):
    """Return the next token after further `tokens`, where it was `value` before them."""
    for token in tokens:
        value = (value * 31 + token + 7) % 1009
    return value


def expected(request, sample):
    text = request.prompt.tolist()
    token = next_token(text, sample)
    for _ in range(request.max_new_tokens):
        text.append(token)
        token = after(token, [token])
    return text


def sampled(step):
    """Return one id for each output; the id of a cancelled run is arbitrary."""
    ids = []
    for run, row in zip(step.outputs, step.output_rows, strict=True):
        source = step.runs[row].held or run.held
        known = [] if source is None else np.asarray(source.tokens)[: source.num_computed_tokens].tolist()
        ids.append(next_token(known, run.sample))
    return ids


def advance(scheduler, steps=1):
    """Run some steps; return the runs of each."""
    runs = []
    for _ in range(steps):
        step = scheduler.schedule()
        scheduler.commit(step)
        scheduler.accept(step, sampled(step))
        runs.append(step.runs)
    return runs


def drain(scheduler, observe=lambda step: None, steps_max=100_000):
    """Run until no request is left; return the finished runs in order."""
    finished = []
    for _ in range(steps_max):
        step = scheduler.schedule()
        if step is None:
            return finished
        observe(step)
        scheduler.commit(step)
        finished += scheduler.accept(step, sampled(step))
    raise AssertionError("the scheduler makes no progress")


def request(number, prompt, new, samples=1, shared=0, namespace=None):
    """Return a request whose prompt is unique, after a common prefix of `shared` tokens."""
    text = np.arange(number * 100, number * 100 + prompt)
    text[:shared] = np.arange(5000, 5000 + prompt)[:shared]
    return Request(number, text, new, samples, namespace)
