"""The prefix tree: its nodes in C++, and the classes around them."""
