"""The tally of parameters, and the parameters of attention, MLPs and experts."""
