"""Parts of prompts, and the outputs of encoders that they need."""

from pagecore.serving.scheduling import parts


class ModelPrompts:
    """Prompts in parts."""

    def part(self, row, budget):
        """Return the tokens of a prompt that a step computes, which end where the prompt keeps a checkpoint."""
        count = self.before_span(row, min(row.left, budget, self.chunk))
        if not self.checkpoints:
            return count
        computed, grid, near = row.sequence.num_computed_tokens, self.cache.grid, parts.NEAREST
        ends = [row.sequence.num_matched_tokens // grid * grid]
        for k in range(self.checkpoints):
            end = (len(row.tokens) - near * 4**k) // grid * grid
            ends += [end] if end - row.sequence.num_cached_tokens >= near else []
        end = min(computed + count, *(end for end in ends if end > computed), len(row.tokens))
        points = [point for point in range(0, end + 1, grid) if computed < point < len(row.tokens)]
        keeps_inner = computed % grid == 0 and row.left > self.cache.short
        if points and not (end == len(row.tokens) and keeps_inner):
            end = points[-1]
        return end - computed

    def missing_outputs(self, row, count):
        """Return the spans that the next tokens of a prompt are in and whose outputs are nowhere."""
        computed, length = row.sequence.num_computed_tokens, len(row.request.prompt)
        return [
            (first, last, digest)
            for first, last, digest in row.request.spans or ()
            if computed < min(last, length) and first < min(computed + count, length) and row.is_prompt
            if digest not in self.outputs
        ]

    def last_needs_output(self, row):
        """Return True if the last known token is in a span whose output is nowhere."""
        last = len(row.tokens) - 1
        return last < len(row.request.prompt) and any(
            first <= last < end and digest not in self.outputs for first, end, digest in row.request.spans or ()
        )

    def before_span(self, row, count):
        """Return `count`, or the tokens before the first span whose output no longer fits the step."""
        coming = {digest: last - first for digest, (_, first, last) in self.encoded.items()}
        for first, last, digest in self.missing_outputs(row, count):
            coming[digest] = max(last - first, coming.get(digest, 0))
            if sum(coming.values()) > self.encoder:
                return max(first - row.sequence.num_computed_tokens, 0)
        return count

    def encode(self, row, count):
        """Note the longest span of each digest whose output a part of a prompt needs."""
        for first, last, digest in self.missing_outputs(row, count):
            _, start, end = self.encoded.get(digest, (row, 0, 0))
            if last - first > end - start:
                self.encoded[digest] = row, first, last
