"""The scheduler: its queue, admission, steps and preemption. `pagecore.serving` exports the public names."""
