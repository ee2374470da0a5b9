"""The planner of attention: the work items of a batch."""
