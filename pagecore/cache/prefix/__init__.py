"""The prefix cache: computed blocks that outlive their sequence and serve later sequences with the same prefix."""
