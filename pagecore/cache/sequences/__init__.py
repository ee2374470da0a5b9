"""A sequence: its tokens and lengths, its hold on the prefix cache, and its encoder output."""
