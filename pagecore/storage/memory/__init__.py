"""Memory of hosts and devices: budgets, figures, mappings, page-locking."""
