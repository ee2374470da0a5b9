"""Memory of a cache: checks of its sizes, the division of a budget, the pools of all groups, and the memory saver."""
